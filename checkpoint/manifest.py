"""manifest.json: what a checkpoint consists of, with the size and hash of each file; written last, read first."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from checkpoint import container
from checkpoint.agreement import Damaged
from checkpoint.pieces import Contents
from checkpoint.run_state import FORMAT, read_state
from checkpoint.tensors import PIECES, check_files, file_hashes, read_contents
from errors import CheckpointRefused

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    """Its bytes."""
    hash: str
    """xxh3 of 128 bits in hex: of its content, or of its parts' hashes for a file of tensors."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    format: int
    """Version of the files."""
    layout: str
    """How the processes that wrote it shared the work, in words."""
    versions: dict[str, str]
    """Of what wrote it."""
    files: dict[str, FileEntry]
    """All files but the manifest, by name."""


def write_manifest(folder: Path, layout: str, contents: Contents, others: Iterable[str]) -> None:
    """List the files of tensors, of which sizes and hashes are known, and others, which are read."""
    hashes = file_hashes(contents)
    files = {name: FileEntry(header.size, hashes[name]) for name, header in contents.files.items()}
    for name in others:
        content = (folder / name).read_bytes()
        files[name] = FileEntry(len(content), container.digest(content))
    manifest = Manifest(FORMAT, layout, _versions(), files)
    (folder / MANIFEST).write_text(_to_text(manifest), encoding="utf-8")


def _to_text(manifest: Manifest) -> str:
    """JSON whose last key is the hash of all before it."""
    body = json.dumps(asdict(manifest), indent=1)
    return f'{body[:-2]},\n "hash": "{container.digest(body.encode())}"\n}}\n'


def _is_as_written(text: str) -> bool:
    """Whether a manifest of any format has the hash that it says."""
    body, _, rest = text.rpartition(',\n "hash": "')
    return rest.startswith(container.digest(f"{body}\n}}".encode()))


def read_manifest(path: Path) -> Manifest:
    """That of the checkpoint in folder `path`.

    Raises:
        CheckpointRefused: the checkpoint has another format.
        Damaged: there is none, or not as it was written.
    """
    file = path / MANIFEST
    if not file.is_file():
        read_state(path)  # one of another format may have none, and says so
    try:
        text = file.read_text(encoding="utf-8")
        raw = json.loads(text)
        if raw.get("format") != FORMAT and _is_as_written(text):
            raise CheckpointRefused(f"{path} has format {raw.get('format')}, this version reads format {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        manifest = Manifest(raw["format"], raw["layout"], raw["versions"], files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(path, file, str(error) or repr(error)) from error
    if text != _to_text(manifest):
        raise Damaged(path, file, "its hash is not the one that was written")
    return manifest


def check_small(path: Path) -> Manifest:
    """Check what a start reads before any tensor: the manifest, that all files are there with their sizes, and the
    content of those that hold no tensors.

    Raises:
        CheckpointRefused: the checkpoint has another format.
        Damaged: naming the file.
    """
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            content = None if holds_tensors(name) or size != entry.size else file.read_bytes()
        except OSError as error:
            raise Damaged(path, file, str(error)) from error
        if size != entry.size:
            raise Damaged(path, file, f"it has {size} bytes instead of {entry.size}")
        if content is not None and container.digest(content) != entry.hash:
            raise Damaged(path, file, "its hash is not the one that was written")
    return manifest


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint.

    Raises:
        CheckpointRefused: it has another format.
        Damaged: naming the file.
    """
    manifest = check_small(path)
    contents = read_contents(path)
    for name, hashed in check_files(path, contents, contents.files).items():
        if name not in manifest.files or manifest.files[name].hash != hashed:
            raise Damaged(path, path / name, f"{PIECES} and {MANIFEST} differ about it")
    return manifest


def holds_tensors(name: str) -> bool:
    """Whether a file of a checkpoint is one of tensors."""
    return name.endswith(".safetensors")


def _versions() -> dict[str, str]:
    commit = _commit(Path(__file__).resolve().parent.parent / ".git")
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | ({"commit": commit} if commit else {})


def _commit(folder: Path) -> str | None:
    """The commit that is checked out, if there is one to read."""
    try:
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        return head if not head.startswith("ref: ") else (folder / head[5:]).read_text(encoding="utf-8").strip()
    except OSError:
        return None
