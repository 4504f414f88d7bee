"""Checkpoints of a run: one folder a step, of safetensors and JSON; no pickle is written or read.

checkpoints/
  latest                 name of the newest whole checkpoint
  step_00000100/
    tensors.safetensors  weights and moments, whole tensors under layout-free names
    state.json           counters, cursor, data's fingerprint, the run's config
    tokenizer.model      the text's tokenizer, where it is known
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import CheckpointRefused
from files import sync, write_whole

FORMAT = 1  # raised when a reader of the old form would misread the new one
_STATE_TYPES = {
    "step": int, "samples": int, "tokens": int, "updates": int, "data": dict, "config": dict, "vocab_size": int,
    "choices": dict,
}  # fmt: skip
TENSORS, STATE, TOKENIZER, LATEST = "tensors.safetensors", "state.json", "tokenizer.model", "latest"


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
    choices: dict[str, str] = field(default_factory=dict)
    """Automatic choices that must not change when the run goes on."""
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
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint, whether or not `latest` had been moved to it."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def save(
    folder: Path, tensors: Mapping[str, Tensor], state: RunState, *, keep: int, tokenizer: Path | None = None
) -> Path:
    """Write one checkpoint, point `latest` at it, then prune.

    Args:
        folder: the run's checkpoints.
        tensors: by layout-free name, whole tensors.
        keep: newest checkpoints kept; 0 keeps all.
        tokenizer: copied into the checkpoint, so that it can be used on its own.

    Raises:
        CheckpointRefused: the disk is full, or the folder cannot be written.
    """
    try:
        return _save(folder, tensors, state, keep, tokenizer)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            _sweep(folder)
        raise CheckpointRefused(
            f"cannot write a checkpoint into {folder}: {error}; make room or set checkpoint.dir to a folder "
            f"that can be written. The checkpoints before it are whole"
        ) from error


def _save(folder: Path, tensors: Mapping[str, Tensor], state: RunState, keep: int, tokenizer: Path | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    target = folder / step_name(state.step)
    beside = folder / f".{target.name}.{os.getpid()}.part"
    beside.mkdir()
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, beside / TENSORS)
    (beside / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, beside / TOKENIZER)
    for part in (*beside.iterdir(), beside):
        sync(part)
    if target.exists():  # the same step again, after going on from an older one, or a folder without a state
        target.replace(beside.with_suffix(".old.part"))
    beside.replace(target)
    sync(folder)
    write_whole(folder / LATEST, target.name + "\n")
    _sweep(folder)
    _prune(folder, keep)
    return target


def _sweep(folder: Path) -> None:
    """Remove what a killed process of this run left unfinished."""
    for left in folder.glob(".*.part"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`; each is renamed first, so that a kill leaves no half of one."""
    for old in list_checkpoints(folder)[:-keep] if keep else []:
        doomed = old.with_name(f".{old.name}.{os.getpid()}.part")
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


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of the checkpoint in folder `path` whose names begin with `prefix`, on the CPU."""
    file = path / TENSORS
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(prefix)}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointRefused(
            f"cannot read {file}: {error}; remove the folder {path} to go on from the checkpoint before it"
        ) from error


def model_tensors(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights alone, by the model's own names, in `dtype`."""
    prefix = "model."
    tensors = read_tensors(path, prefix)
    return {name[len(prefix) :]: tensor.to(dtype) for name, tensor in tensors.items()}


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from.

    Args:
        resume: auto, none, or the path of a checkpoint, of a folder of checkpoints or of a run. A path is
            where a new run begins; once the run has a checkpoint of its own, that one is taken.
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
    if resume in ("auto", "none") or own is not None:
        return own
    return locate(Path(resume).expanduser())


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
