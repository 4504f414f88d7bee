"""All processes do something, and go on only if all could."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from errors import CheckpointRefused
from parallel.process import Everyone

_IN_WORDS = (CheckpointRefused, OSError)


class Damaged(CheckpointRefused):
    """A checkpoint's files are not what was written."""

    def __init__(self, path: Path, file: Path, reason: str) -> None:
        super().__init__(
            f"the checkpoint {path} is damaged: {file.name}: {reason}; go on from the one before it "
            "(checkpoint.resume=auto does), or remove the folder"
        )
        self.path, self.file, self.reason = path, file, reason


def together(everyone: Everyone, act: Callable[[], str | None]) -> list[str]:
    """Every process's answer, in the order of ranks; none returns before all have acted.

    An exception on one must not leave the others waiting for it: its text is the answer, and all raise.

    Raises:
        Damaged: that is what a process found; the same on all.
        CheckpointRefused: a process failed; the same words on all, with the rank if there are several.
    """
    failure: Exception | None = None
    try:
        text = "+" + (act() or "")
    except Damaged as error:
        failure, text = error, "!" + json.dumps([str(error.path), str(error.file), error.reason])
    except Exception as error:
        failure = error
        text = "-" + (str(error) if isinstance(error, _IN_WORDS) else f"{type(error).__name__}: {error}")
    texts = everyone.gather(text)
    if failure is not None and not isinstance(failure, _IN_WORDS):
        raise failure  # a fault of the program keeps its traceback
    for each in texts:
        if each.startswith("!"):
            path, file, reason = json.loads(each[1:])
            raise Damaged(Path(path), Path(file), reason) from failure
    failed = [rank for rank, each in enumerate(texts) if each.startswith("-")]
    if failed:
        raise CheckpointRefused(_words(texts, failed)) from failure
    return [each[1:] for each in texts]


def _words(texts: list[str], failed: list[int]) -> str:
    reason = texts[failed[0]][1:]
    if len(texts) == 1:
        return reason
    others = f" (and {len(failed) - 1} more of {len(texts)} ranks)" if len(failed) > 1 else ""
    return f"rank {failed[0]}{others}: {reason}"
