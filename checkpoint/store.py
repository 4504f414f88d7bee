"""Checkpoints of a run: one folder a step, of safetensors and JSON; no pickle is written or read.

checkpoints/
  latest                       name of the newest whole checkpoint
  step_00000100/
    tensors.safetensors        weights and moments, whole, by global name; where several processes write:
    tensors_00003.safetensors  ... the pieces that rank 3 writes, by the same names
    pieces.json                dtype and shape of every whole tensor, which rectangle of it is in which file, and hashes
    state.json                 counters, cursor, data's fingerprint, the run's config
    tokenizer.model            the text's tokenizer where it is known and has a file (or tokenizer.json)
    manifest.json              size and hash of every file, layout and versions; written last

    rank 0       sweep, make .part           its file    pieces, state, manifest; check; rename, latest, prune
    every other                              its file
    all                        agree: ready          agree: all written                             agree: done
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from checkpoint.agreement import Damaged, together
from checkpoint.folder import LATEST, beside, prune, step_name, sweep
from checkpoint.manifest import MANIFEST, check_small, holds_tensors, write_manifest
from checkpoint.pieces import Contents, Piece, from_json, merge, to_json
from checkpoint.run_state import STATE, RunState
from checkpoint.tensors import (
    PIECES,
    check_files,
    check_same,
    difference,
    file_name,
    fill,
    read_contents,
    read_whole,
    write,
)
from errors import CheckpointRefused
from files import sync, write_whole
from parallel.process import Everyone

_ALONE = Everyone()

Remover = Callable[[Path], object]
"""Removes a folder of its name for good, now or soon."""
Writer = Callable[[Path, str, Mapping[str, Piece]], Contents]
"""Writes into a folder the file of a name, with what one process is to write."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is whole."""

    keep: int = 0
    """The newest; 0: all."""
    keep_every: int = 0
    """Those of every so many steps, for ever; 0: of none."""


def save(
    folder: Path,
    pieces: Mapping[str, Piece],
    state: RunState,
    *,
    keep: Retention,
    files: Mapping[str, bytes] = MappingProxyType({}),
    everyone: Everyone = _ALONE,
    read_back: bool = False,
    writer: Writer = write,
    remove: Remover = shutil.rmtree,
) -> Path:
    """Write one checkpoint, point `latest` at it, then prune; called by every process, none of which returns before
    the whole is on the disk.

    Args:
        folder: the run's checkpoints; every process sees it.
        pieces: by global name, what this process holds.
        state: rank 0's is written.
        keep: which of the older ones stay.
        files: contents of further ones by their names, such as the tokenizer's, without which text means nothing.
        read_back: whether each process also reads its file again and compares hashes before the checkpoint counts.
        writer: writes this process's file.
        remove: what becomes of those that do not stay; until the next save it must have been done.

    Raises:
        CheckpointRefused: the disk is full, or the folder cannot be written, by this process or another.
        ValueError: the pieces do not cover a tensor exactly once (on rank 0).
    """
    file = file_name(everyone.rank, everyone.world)

    def write_own(part: Path) -> str:
        contents = writer(part, file, pieces)
        if read_back and contents.files:
            check_files(part, contents, [file])
        return to_json(contents)

    def complete(part: Path, texts: list[str]) -> None:
        contents = merge(map(from_json, texts))
        (part / PIECES).write_text(to_json(contents), encoding="utf-8")
        (part / STATE).write_text(state.to_json(), encoding="utf-8")
        for name, content in files.items():
            (part / name).write_bytes(content)
        write_manifest(part, state.layout, contents, [PIECES, STATE, *files])

    return _commit(folder / step_name(state.step), write_own, complete, keep, everyone, remove)


def transfer(path: Path, folder: Path, *, keep: Retention, everyone: Everyone = _ALONE) -> Path:
    """Copy a whole checkpoint into another folder of checkpoints, each process its own file, with the same care.

    Raises:
        CheckpointRefused: as `save`; Damaged: what is copied is not what was written.
    """
    file = file_name(everyone.rank, everyone.world)

    def copy_own(part: Path) -> str:
        contents = read_contents(path)
        if file in contents.files:
            shutil.copyfile(path / file, part / file)
            sync(part / file)
            check_files(part, contents, [file])
        return ""

    def complete(part: Path, _: list[str]) -> None:
        for name in (*(each for each in check_small(path).files if not holds_tensors(each)), MANIFEST):
            shutil.copyfile(path / name, part / name)

    return _commit(folder / path.name, copy_own, complete, keep, everyone)


def _commit(
    target: Path, write_own: Callable[[Path], str], complete: Callable[[Path, list[str]], None], keep: Retention,
    everyone: Everyone, remove: Remover = shutil.rmtree,
) -> Path:  # fmt: skip
    """Write beside, check, rename, point `latest` at it, prune; what is left of a failure is removed."""
    first, part = everyone.rank == 0, beside(target)
    try:
        together(everyone, lambda: _begin(part) if first else None)
        texts = together(everyone, lambda: write_own(part))
        together(everyone, lambda: _finish(part, target, texts, complete, keep, remove) if first else None)
        return target
    except Exception as error:
        if first:  # all have stopped writing: they agree before any goes on
            with suppress(OSError):
                sweep(target.parent)
        if not isinstance(error, CheckpointRefused):
            raise
        raise CheckpointRefused(
            f"cannot write a checkpoint into {target.parent}: {error}; make room or set checkpoint.dir to a folder "
            f"that every process can write. The checkpoints before it are whole"
        ) from error


def _begin(part: Path) -> None:
    """The folder that all write into; only one makes it, so that a process of a host that does not see it fails."""
    part.parent.mkdir(parents=True, exist_ok=True)
    sweep(part.parent)
    part.mkdir()


def _finish(
    part: Path, target: Path, texts: list[str], complete: Callable[[Path, list[str]], None], keep: Retention,
    remove: Remover,
) -> None:  # fmt: skip
    """Complete what all have written, and make it the newest checkpoint."""
    complete(part, texts)
    for file in part.iterdir():
        if not holds_tensors(file.name):
            sync(file)
    check_small(part)
    sync(part)
    gone = []
    if target.exists():  # the same step again, after going on from an older one, or what only has its name
        gone.append(target.replace(part.with_suffix(".old.part")))
    part.replace(target)
    sync(target.parent)
    write_whole(target.parent / LATEST, target.name + "\n")
    for each in gone + prune(target.parent, keep.keep, keep.keep_every):
        remove(each)


def load(
    path: Path, pieces: Mapping[str, Piece], everyone: Everyone = _ALONE, fresh: tuple[str, ...] = ()
) -> None:  # fmt: skip
    """Fill every piece in place from the checkpoint in folder `path`, whatever layout wrote it; called by every
    process, as what one lacks another may hold.

    Names that begin with one of `fresh` are left alone, here as there.

    Raises:
        CheckpointRefused: names, whole shapes or dtypes are not the same.
        Damaged: a file is not what was written, as this process or another has found.
    """
    pieces = {name: piece for name, piece in pieces.items() if not name.startswith(fresh)}
    held = _held(pieces, everyone)

    def take() -> None:
        contents = read_contents(path)
        tensors = {name: entry for name, entry in contents.tensors.items() if not name.startswith(fresh)}
        check_same(tensors, held, pieces)
        fill(path, Contents(contents.files, tensors), pieces)

    together(everyone, take)


def _held(pieces: Mapping[str, Piece], everyone: Everyone) -> set[str]:
    """Names of all processes' pieces."""
    return {name for names in everyone.gather(json.dumps(list(pieces))) for name in json.loads(names)}


_WEIGHTS = "model."


def load_weights(
    path: Path, pieces: Mapping[str, Piece], exceptions: Sequence[str] = (), everyone: Everyone = _ALONE
) -> tuple[list[str], list[str]]:
    """Fill the weights in place from the checkpoint in folder `path`, and nothing else; called by every process.

    Args:
        exceptions: patterns of the names of weights that may be missing there, or of another shape or dtype, and keep
            their values; or may be there and not here.

    Returns:
        Names of weights that keep their values, and of weights there that were not read, without `model.`.

    Raises:
        CheckpointRefused: other weights differ, which are named.
        Damaged: as `load`.
    """
    check_small(path)
    contents = read_contents(path)
    there = {name: entry for name, entry in contents.tensors.items() if name.startswith(_WEIGHTS)}
    own = {name: piece for name, piece in pieces.items() if name.startswith(_WEIGHTS)}
    held = _held(own, everyone)
    other = {name: words for name in own.keys() & there.keys() if (words := difference(name, there[name], own[name]))}
    differing = _held({name: own[name] for name in other}, everyone)
    missing, extra = sorted((held - there.keys()) | differing), sorted(there.keys() - held)
    bare = [name.removeprefix(_WEIGHTS) for name in (*missing, *extra)]
    refused = [name for name in bare if not any(fnmatchcase(name, each) for each in exceptions)]
    if refused:
        raise CheckpointRefused(_unlike(path, missing, extra, list(other.values()), refused))
    taken = {name: piece for name, piece in own.items() if name not in missing}
    together(everyone, lambda: fill(path, contents, taken))
    return bare[: len(missing)], bare[len(missing) :]


def _unlike(path: Path, missing: list[str], extra: list[str], differing: list[str], refused: list[str]) -> str:
    """Why weights cannot be loaded, and what would allow it."""
    told = (
        f"its weights are not this model's: missing {missing[:5]} ({len(missing)}), unknown {extra[:5]} ({len(extra)})"
    )
    other = f"; {'; '.join(differing[:3])}" if differing else ""
    names = ",".join(refused[:5]) + (",..." if len(refused) > 5 else "")
    return (
        f"checkpoint.load={path}: {told}{other}; choose the model that wrote it, or, to keep first values where it has "
        f"none, name them: checkpoint.load_except=[{names}]"
    )


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors of the checkpoint in folder `path` whose names begin with `prefix`, on the CPU."""
    return read_whole(path, prefix, None)


def model_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights alone, whole, by the model's own names, in `dtype`."""
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in read_whole(path, _WEIGHTS, dtype).items()}


__all__ = [
    "Damaged",
    "Retention",
    "RunState",
    "load",
    "load_weights",
    "model_tensors",
    "read_tensors",
    "save",
    "transfer",
]
