"""What the library `datasets` and the hub refuse, in words with a fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from errors import DataRefused


def library(name: str) -> Any:
    """The module `datasets`. Raises DataRefused, for the dataset `name`, where it is not installed."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataRefused(
            f"the dataset {name} needs the package datasets, which is missing: pip install datasets"
        ) from (error)
    return datasets


def said(error: BaseException) -> str:
    """An error's words in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def translated(name: str, subset: str | None) -> Iterator[None]:
    """Turns whatever the library raises about the dataset `name` into DataRefused."""
    try:
        yield
    except DataRefused:
        raise
    except Exception as error:  # it hands on the errors of a dozen libraries
        raise DataRefused(_words(name, subset, error)) from error


def _words(name: str, subset: str | None, error: Exception) -> str:
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # its own words say only that something went wrong
    text = said(error)
    for holds, words in _CASES:
        if holds(error, text):
            return words.format(name=name, subset=subset, text=text)
    return f"the dataset {name} cannot be read ({type(error).__name__}: {text}): check its files and its settings"


def _is_unreachable(error: BaseException | None, text: str = "") -> bool:
    """Whether the network is the reason, here or further down in the chain."""
    if error is None:
        return False
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _NETWORK:
        return True
    return _is_unreachable(error.__cause__) or _is_unreachable(error.__context__)


_NETWORK = frozenset(
    {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError"}
)

_CASES: tuple[tuple[Callable[[Exception, str], bool], str], ...] = (
    (
        lambda error, text: "scripts are no longer supported" in text,
        "the dataset {name} comes with code of its own, which is never run ({text}): download its files and give them "
        "as input, or take a copy of it in parquet",
    ),
    (
        lambda error, text: "gated" in text or "must be authenticated" in text,
        "the dataset {name} is gated ({text}): accept its terms on its page on the hub, then log in with `hf auth "
        "login` or set HF_TOKEN",
    ),
    (
        lambda error, text: "BuilderConfig" in text and "not found" in text,
        "the dataset {name} has no subset {subset} ({text}): set subset to one of these",
    ),
    (
        lambda error, text: "Config name is missing" in text,
        "the dataset {name} has several subsets, none of them its default ({text}): set subset to one of these",
    ),
    (
        lambda error, text: "Couldn't find cache for" in text,
        "the hub cannot be reached, and no copy of {name} with subset {subset} is in the cache ({text}): connect, or "
        "set subset to one of these",
    ),
    (
        lambda error, text: type(error).__name__ == "DatasetNotFoundError",
        "there is no dataset {name} that you may read ({text}): check its name and revision; for a private one log in "
        "with `hf auth login` or set HF_TOKEN",
    ),
    (
        lambda error, text: type(error).__name__ in ("DataFilesNotFoundError", "EmptyDatasetError"),
        "the dataset {name} has no files to read ({text}): check its name, subset and data_files",
    ),
    (
        _is_unreachable,
        "the dataset {name} cannot be reached ({text}): run `python -m data.prepare` where there is a network (a login "
        "node), with HF_HOME on a disk that the compute nodes see too, or give a local folder as dataset",
    ),
    (
        lambda error, text: isinstance(error, OSError) and error.errno is not None,
        "the dataset {name} cannot be read or cached ({text}): make room, or set HF_HOME to a folder that can be "
        "written",
    ),
)
