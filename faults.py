"""Finds where a step's numbers went wrong, and keeps what it takes to do so again: RUN/faults/step_N.

The folder is a checkpoint of the weights (and scales) that the step began with, with the micro-batch at fault as
tensors of its own, `replay.*`, and fault.json, which says what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import store
from checkpoint.pieces import Piece, whole
from checkpoint.run_state import RunState
from data.batch import MicroBatch
from engine import Engine
from errors import CheckpointRefused
from metrics.clock import StepClock
from metrics.fault import Fault
from parallel.process import Everyone
from recording import Done, Progress

FAULT = "fault.json"
REPLAY = "replay."
_TENSORS = ("tokens", "labels", "positions", "cu_seqlens")
_KEPT = ("model.", "fp8.")


class FaultFiles:
    """Makes faulty steps again, on all ranks."""

    def __init__(
        self, folder: Path, engine: Engine, everyone: Everyone, clock: StepClock,
        state: Callable[[Progress], RunState],
    ) -> None:  # fmt: skip
        """folder: where they are kept; clock: what is kept is a save; state: says where the run stands."""
        self.folder, self.engine, self.everyone, self.clock, self.state = folder, engine, everyone, clock, state

    def take(self, progress: Progress, done: Done) -> tuple[str, dict[str, Any]]:
        """Make a step again that changed nothing: what is to be told of it, and its record; every rank must ask."""
        batches, scale = done.batch.micro_batches, done.outcome.loss_scale
        fault = self.engine.locate(batches, done.agreed.valid_tokens, self.everyone, scale[0] if scale else None)
        if fault is None:
            later = f" with the weights of step {progress.step}" if progress.step > done.step else ""
            text = f"made again{later}, its numbers are finite; data and weights alone do not explain it"
            return text, {"found": False}
        values = {"found": True, **asdict(fault)}
        try:
            with self.clock.part("checkpoint"):
                path = self._keep(progress, done, fault)
        except CheckpointRefused as refusal:
            return f"{fault.words}; not kept: {refusal}", values
        return f"{fault.words}; again: python -m launch.replay {path}", {**values, "path": str(path)}

    def _keep(self, progress: Progress, done: Done, fault: Fault) -> Path:
        """Write the folder."""
        pieces = {name: each for name, each in self.engine.pieces().items() if name.startswith(_KEPT)}
        if self.engine.mesh.rank == fault.rank:
            pieces |= batch_pieces(done.batch.micro_batches[fault.micro_batch or 0])
        samples = done.batch.micro_batches[fault.micro_batch or 0].samples
        scale = done.outcome.loss_scale[0].item() if done.outcome.loss_scale else None
        told = {
            "fault": asdict(fault), "valid_tokens": done.agreed.valid_tokens, "loss_scale": scale,
            "first_sample": samples.start if fault.samples is None else fault.samples[0],
        }  # fmt: skip
        return store.save(
            self.folder, pieces, replace(self.state(progress), step=done.step), keep=store.Retention(),
            files={FAULT: json.dumps(told, indent=1).encode()}, everyone=self.everyone,
        )  # fmt: skip


def batch_pieces(batch: MicroBatch) -> dict[str, Piece]:
    """A micro-batch as tensors of a checkpoint."""
    return {f"{REPLAY}{name}": whole(getattr(batch, name)) for name in _TENSORS}


def batch_of(tensors: Mapping[str, Tensor], first_sample: int, seq_len: int) -> MicroBatch:
    """The micro-batch that `batch_pieces` made tensors of; first_sample: its first sample's global number."""
    tokens, labels, positions, borders = (tensors[f"{REPLAY}{name}"] for name in _TENSORS)
    samples = range(first_sample, first_sample + len(tokens) // seq_len)
    return MicroBatch(tokens, labels, positions, borders.to(torch.int32), samples)
