"""Which files a list of paths, folders and patterns means, and what each is called in the keys of its documents."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.texts.blocks import COMPRESSED, reading
from errors import DataRefused

Format = Literal["text", "jsonl", "parquet"]

# The well-known corpora name their JSON lines .json.
_ENDINGS: dict[str, Format] = {
    ".txt": "text", ".text": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json-lines": "jsonl", ".jsonlines": "jsonl", ".json": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
# Never text: a corpus must not be filled with them by a pattern that is too wide.
_UNREADABLE = frozenset({
    ".7z", ".arrow", ".bin", ".bz2", ".csv", ".docx", ".feather", ".gif", ".h5", ".idx", ".jpeg", ".jpg", ".lz4",
    ".model", ".npy", ".npz", ".orc", ".pdf", ".pickle", ".pkl", ".png", ".pt", ".pth", ".rar", ".safetensors",
    ".snappy", ".sqlite", ".tar", ".tgz", ".tsv", ".warc", ".xls", ".xlsx", ".xz", ".zip", ".zstd",
})  # fmt: skip


@dataclass(frozen=True)
class FoundFile:
    """One file to read."""

    name: str
    """Its path below the folder that its pattern begins with, with forward slashes: moving a corpus keeps its keys."""
    path: Path
    """Where it is, absolute."""
    format: Format
    """What it holds."""
    size: int
    """Bytes on disk."""
    modified: int
    """Time of its last change, in nanoseconds."""


def find_files(inputs: Sequence[str], format: Format | Literal["auto"]) -> list[FoundFile]:
    """The files that `inputs` mean, sorted by path; one that is reached twice counts once.

    An input is a file, a pattern (`**` goes through folders) or a folder. A folder means the text (.txt), jsonl and
    parquet files below it, or every file below it where `format` is not auto; names that begin with a dot are left
    out. With auto, a file that is named or matched has its format by its ending, and is text when that says nothing.
    Raises DataRefused for an input without files, and for a file of a format that is not read.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for item in inputs:
        for path, root in _matches(item, format):
            found.setdefault(os.path.realpath(path), (path, root))
    if not found:
        raise DataRefused("there are no inputs: give a file, a folder or a pattern such as web/**/*.jsonl")
    chosen = sorted(found.values())
    names = _names(chosen)
    return [_described(name, path, format) for name, (path, _) in zip(names, chosen, strict=True)]


def _matches(item: str, format: str) -> list[tuple[Path, Path]]:
    """Files of one input, absolute and sorted, each with the folder that its name starts from."""
    given = Path(item).expanduser().absolute()
    with reading(given):
        if given.is_dir():
            paths, root = [path for path in _below(given) if format != "auto" or _known(path)], given
        elif given.exists():
            paths, root = [given], given.parent
        else:
            paths, root = _matching(str(Path(item).expanduser()))
    if not paths:
        raise DataRefused(_nothing(item, given))
    return [(path, root) for path in sorted(paths)]


def _matching(pattern: str) -> tuple[list[Path], Path]:
    """Files that match, and the part of the pattern before its first wildcard."""
    matched = (Path(path).absolute() for path in glob.iglob(pattern, recursive=True))  # noqa: PTH207 it may be absolute
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parent.parts)
    return [path for path in matched if not path.is_dir()], Path(*fixed).absolute()


def _nothing(item: str, given: Path) -> str:
    if given.is_dir():
        return (
            f"the folder {given} holds no text (.txt), jsonl or parquet files (also .gz, .zst): give a pattern such as "
            f"{item.rstrip('/')}/**/*.md, or the format"
        )
    if "://" in item:
        return f"{item} is not on this machine: copy it here, or read a Hugging Face dataset by its name (dataset)"
    return f"{item} matches no file (from {Path.cwd()}): check the path; ** goes through folders"


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, onerror=_raised):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(where, name) for name in files if not name.startswith("."))


def _raised(error: OSError) -> None:
    raise error


def _names(files: Sequence[tuple[Path, Path]]) -> list[str]:
    """A name for each file, below its root, or below a folder further up where two would have one name."""
    tried = ([_below_root(path, root, up) for path, root in files] for up in itertools.count())
    return next(names for names in tried if len(set(names)) == len(names))


def _below_root(path: Path, root: Path, up: int) -> str:
    return path.relative_to(Path(*root.parts[: max(1, len(root.parts) - up)])).as_posix()


def _ending(path: Path) -> str:
    """The last ending in small letters, without one of compression."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def _known(path: Path) -> bool:
    return _ending(path) in _ENDINGS


def _described(name: str, path: Path, wanted: Format | Literal["auto"]) -> FoundFile:
    ending = _ending(path)
    if wanted == "auto" and ending in _UNREADABLE:
        raise DataRefused(
            f"{path} ends in {ending}, so it is no text, jsonl or parquet: leave it out, convert it, or give the format"
        )
    format = _ENDINGS.get(ending, "text") if wanted == "auto" else wanted
    if format == "parquet" and path.suffix.lower() in COMPRESSED:
        raise DataRefused(f"{path} is compressed as a whole, but parquet is compressed inside: decompress it")
    with reading(path):
        status = path.stat()
    return FoundFile(name, path, format, status.st_size, status.st_mtime_ns)
