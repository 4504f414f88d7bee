"""Checkpoints of a run: one folder a step, of safetensors and JSON; no pickle is written or read.

checkpoints/
  latest                       name of the newest whole checkpoint
  step_00000100/
    tensors.safetensors        weights and moments, whole, by global name; where several processes write:
    tensors_00003.safetensors  ... the pieces that rank 3 writes, by the same names
    pieces.json                dtype and shape of every whole tensor, and which rectangle of it is in which file
    state.json                 counters, cursor, data's fingerprint, the run's config
    tokenizer.model            the text's tokenizer where it is known and has a file (or tokenizer.json)

    rank 0       sweep, make .part           its file          pieces.json, state.json, rename, latest, prune
    every other                              its file
    all                        agree: ready          agree: all written                                    agree: done
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from checkpoint.agreement import together
from checkpoint.pieces import Piece, from_json, merge, to_json
from checkpoint.tensors import PIECES, check_same, file_name, fill, read_index, read_whole, write
from errors import CheckpointRefused
from files import sync, write_whole
from parallel.process import Everyone

FORMAT = 3  # raised when a reader of the old form would misread the new one
_STATE_TYPES = {
    "step": int, "samples": int, "tokens": int, "updates": int, "data": dict, "config": dict, "vocab_size": int,
    "choices": dict, "layout": str, "phases": list, "rewound": list,
}  # fmt: skip
STATE, LATEST = "state.json", "latest"
_ALONE = Everyone()


@dataclass(frozen=True)
class RunState:
    """Everything but tensors that a run needs to go on."""

    step: int
    """Steps done, skipped ones included; also the schedule's position."""
    samples: int
    """Sequences seen: the data cursor."""
    tokens: int
    """Tokens seen."""
    updates: int
    """Steps that changed the weights."""
    data: dict[str, str]
    """Fingerprint of each source's content."""
    config: dict[str, Any]
    """The run's whole configuration, as it was given."""
    vocab_size: int
    """Entries of the model's vocabulary."""
    tokenizer: str | None = None
    """The tokenizer's file in the checkpoint, or `bytes`; None: unknown."""
    tokenizer_fingerprint: str | None = None
    """Hash of the tokenizer that made the data; None: unknown."""
    rewound: list[int] = field(default_factory=list)
    """Steps that the run has gone back to on its way here."""
    phases: list[dict[str, Any]] = field(default_factory=list)
    """Mixtures that the run has gone through, as `data.samples.Phase`."""
    choices: dict[str, str] = field(default_factory=dict)
    """Automatic choices that must not change when the run goes on."""
    layout: str = "one process"
    """How the processes that wrote it shared the work, in words."""
    wandb_id: str | None = None
    """W&B run to go on with."""
    format: int = FORMAT
    """Version of this layout of files."""


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in _steps(folder) if (path / STATE).is_file()]


def _steps(folder: Path) -> list[Path]:
    """Everything in the folder that has a checkpoint's name, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint, whether or not `latest` had been moved to it."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def save(
    folder: Path,
    pieces: Mapping[str, Piece],
    state: RunState,
    *,
    keep: int,
    tokenizer: Mapping[str, bytes] = MappingProxyType({}),
    everyone: Everyone = _ALONE,
) -> Path:
    """Write one checkpoint, point `latest` at it, then prune; called by every process, none of which returns before
    the whole is on the disk.

    Args:
        folder: the run's checkpoints; every process sees it.
        pieces: by global name, what this process holds.
        state: rank 0's is written.
        keep: newest checkpoints kept; 0 keeps all.
        tokenizer: contents of its files, by their names in the checkpoint, which can then be used on its own.

    Raises:
        CheckpointRefused: the disk is full, or the folder cannot be written, by this process or another.
        ValueError: the pieces do not cover a tensor exactly once (on rank 0).
    """
    try:
        return _save(folder, pieces, state, keep, tokenizer, everyone)
    except Exception as error:
        if everyone.rank == 0:  # all have stopped writing: they agree before any goes on
            with suppress(OSError):
                _sweep(folder)
        if not isinstance(error, CheckpointRefused):
            raise
        raise CheckpointRefused(
            f"cannot write a checkpoint into {folder}: {error}; make room or set checkpoint.dir to a folder "
            f"that every process can write. The checkpoints before it are whole"
        ) from error


def _save(
    folder: Path, pieces: Mapping[str, Piece], state: RunState, keep: int, tokenizer: Mapping[str, bytes],
    everyone: Everyone,
) -> Path:  # fmt: skip
    target, first = folder / step_name(state.step), everyone.rank == 0
    beside = _beside(target)
    together(everyone, lambda: _begin(beside) if first else None)
    file = file_name(everyone.rank, everyone.world)
    lists = together(everyone, lambda: to_json(write(beside, file, pieces)))
    together(everyone, lambda: _finish(beside, target, lists, state, keep, tokenizer) if first else None)
    return target


def _begin(beside: Path) -> None:
    """The folder that all write into; only one makes it, so that a process of a host that does not see it fails."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    _sweep(beside.parent)
    beside.mkdir()


def _finish(
    beside: Path, target: Path, lists: list[str], state: RunState, keep: int, tokenizer: Mapping[str, bytes]
) -> None:  # fmt: skip
    """Complete what all have written, and make it the newest checkpoint.

    Args:
        lists: each process's pieces, as JSON.
    """
    (beside / PIECES).write_text(to_json(merge(map(from_json, lists))), encoding="utf-8")
    (beside / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    for name, content in tokenizer.items():
        (beside / name).write_bytes(content)
    for part in (PIECES, STATE, *tokenizer, "."):
        sync(beside / part)
    if target.exists():  # the same step again, after going on from an older one, or a folder without a state
        target.replace(beside.with_suffix(".old.part"))
    beside.replace(target)
    sync(target.parent)
    write_whole(target.parent / LATEST, target.name + "\n")
    _sweep(target.parent)
    _prune(target.parent, keep)


def _beside(path: Path) -> Path:
    """Where a checkpoint is while it is not whole; every process knows the name."""
    return path.with_name(f".{path.name}.part")


def _sweep(folder: Path) -> None:
    """Remove what a killed process of this run left unfinished."""
    for left in folder.glob(".*.part"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`; each is renamed first, so that a kill leaves no half of one."""
    for old in list_checkpoints(folder)[:-keep] if keep else []:
        doomed = _beside(old)
        old.replace(doomed)
        shutil.rmtree(doomed)


def read_state(path: Path) -> RunState:
    """The state of the checkpoint in folder `path`.

    Raises:
        CheckpointRefused: not a checkpoint, unreadable, or of another format.
    """
    file = path / STATE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointRefused(
            f"{path} is not a readable checkpoint ({file.name}: {error}); name a folder like "
            f"runs/NAME/checkpoints/{step_name(100)}"
        ) from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise CheckpointRefused(f"{file} has format {found}, this version reads format {FORMAT}")
    wrong = [key for key, kind in _STATE_TYPES.items() if not isinstance(raw.get(key), kind)]
    unknown = raw.keys() - {each.name for each in fields(RunState)}
    if wrong or unknown:
        raise CheckpointRefused(
            f"{file} does not hold a run's state ({', '.join(sorted({*wrong, *unknown}))}): it is damaged; remove the "
            f"folder {path} to go on from the checkpoint before it"
        )
    return RunState(**raw)


def load(
    path: Path, pieces: Mapping[str, Piece], everyone: Everyone = _ALONE, fresh: tuple[str, ...] = ()
) -> None:  # fmt: skip
    """Fill every piece in place from the checkpoint in folder `path`, whatever layout wrote it; called by every
    process, as what one lacks another may hold.

    Names that begin with one of `fresh` are left alone, here as there.

    Raises:
        CheckpointRefused: names, whole shapes or dtypes are not the same, or a file is damaged, here or on another
            process.
    """
    pieces = {name: piece for name, piece in pieces.items() if not name.startswith(fresh)}
    held = {name for names in everyone.gather(json.dumps(list(pieces))) for name in json.loads(names)}

    def take() -> None:
        index = {name: entry for name, entry in read_index(path).items() if not name.startswith(fresh)}
        check_same(index, held, pieces)
        fill(path, index, pieces)

    together(everyone, take)


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors of the checkpoint in folder `path` whose names begin with `prefix`, on the CPU."""
    return read_whole(path, prefix, None)


def model_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights alone, whole, by the model's own names, in `dtype`."""
    prefix = "model."
    return {name[len(prefix) :]: tensor for name, tensor in read_whole(path, prefix, dtype).items()}


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from.

    Args:
        resume: auto, none, or the path of a checkpoint, of a folder of checkpoints or of a run. A path is
            where a new run begins; once the run has a checkpoint of its own, the newest is taken. The path of one of
            its own goes back to it, once: those that come of it say so.
        folder: the run's own checkpoints.

    Raises:
        CheckpointRefused: the path holds no checkpoint, or a new run was asked for where one exists.
    """
    _check_folder(folder)
    own = newest(folder)
    if resume == "none" and own is not None:
        raise CheckpointRefused(
            f"checkpoint.resume=none, but {folder} already holds {own.name}; nothing is overwritten: "
            f"choose another run.name, remove that folder, or use checkpoint.resume=auto to go on"
        )
    if resume in ("auto", "none"):
        return own
    if own is None:
        return locate(Path(resume).expanduser())
    asked = Path(resume).expanduser()
    back = next((path for path in list_checkpoints(folder) if asked.exists() and path.samefile(asked)), None)
    return own if back is None or step_of(back) in read_state(own).rewound else back


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


def set_aside(checkpoint: Path) -> list[Path]:
    """Give the checkpoints that are newer than this one of the same folder other names; returns these."""
    moved = []
    for path in list_checkpoints(checkpoint.parent):
        if step_of(path) > step_of(checkpoint):
            names = (path.with_name(f"set_aside_{path.name}.{number}") for number in count(1))
            moved.append(next(name for name in names if not name.exists()))
            path.rename(moved[-1])
    sync(checkpoint.parent)
    write_whole(checkpoint.parent / LATEST, checkpoint.name + "\n")
    return moved


def _check_folder(folder: Path) -> None:
    """Refuse a folder of checkpoints that is none, or holds a checkpoint without its state (a rename makes it whole
    at once, so something else has been there)."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointRefused(f"{folder} is a file, but must be the folder of the checkpoints; remove it")
    for path in _steps(folder):
        if not (path / STATE).is_file():
            raise CheckpointRefused(f"{path} has no {STATE}: it is damaged; remove it to go on from the one before it")


def locate(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest one inside it.

    Raises:
        CheckpointRefused: there is none.
    """
    if (path / STATE).is_file():
        return path
    inside = newest(path) or newest(path / "checkpoints")
    if inside is None:
        raise CheckpointRefused(
            f"{path} holds no checkpoint; name a folder like "
            f"runs/NAME/checkpoints/{step_name(100)}, or a run's directory"
        )
    return inside
