"""Makes the faults of debug.inject happen: they are real ones, and nothing else in the program knows of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metrics.inject_config import DebugConfig, InjectConfig


class Injector:
    """Listens to the parts of a step on this process (as metrics.clock.Listener)."""

    def __init__(self, config: DebugConfig, rank: int, attempt: int, say: Callable[[str], None]) -> None:
        self.say, self.step, self._worked_from = say, 0, 0.0
        self._faults = [
            each for each in config.inject if each.rank == rank and (each.attempt is None or each.attempt == attempt)
        ]

    def begin_step(self, step: int) -> None:
        """The step that comes, from 1."""
        self.step = step

    def begins(self, part: str) -> None:
        """A part of the step begins: kill and hang happen here."""
        self._worked_from = time.thread_time()
        for fault in self._of("kill", "hang"):
            if fault.step != self.step or fault.phase != part:
                continue
            self._tell(fault)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(3600)

    def ends(self, part: str) -> None:
        """A part of the step ends: the work of a slow rank takes longer."""
        worked = time.thread_time() - self._worked_from
        for fault in self._of("slow"):
            if fault.phase == part and fault.step <= self.step <= (fault.last or self.step):
                _work(worked * (fault.factor - 1.0))

    def poison(self, layers: Mapping[int, nn.Module], micro_batch: Callable[[], int]) -> None:
        """Prepare blocks that give a NaN.

        Args:
            layers: the blocks on this rank by their numbers in the model.
            micro_batch: the number on this rank of the one that is worked on.
        """
        for fault in self._of("nan"):
            if fault.layer in layers:
                layers[fault.layer].register_forward_hook(partial(self._spoil, fault, micro_batch))

    def _spoil(
        self, fault: InjectConfig, micro_batch: Callable[[], int], module: nn.Module, args: Any, out: Tensor
    ) -> None:  # fmt: skip
        """out: [T, hidden] of the block; its first row becomes NaN, unseen by autograd: with another graph on one rank,
        FSDP would gather in another order there."""
        if fault.step == self.step and fault.micro_batch == micro_batch() and torch.is_grad_enabled():
            out.data[0] = float("nan")

    def disk_full(self, step: int) -> bool:
        """Whether this process cannot write the checkpoint of a step."""
        return any(fault.step == step for fault in self._of("disk_full"))

    def after_save(self, step: int, path: Path) -> None:
        """A checkpoint is whole: flip a byte of its largest file."""
        for fault in self._of("corrupt"):
            if fault.step == step:
                self._tell(fault)
                _flip(max(path.iterdir(), key=lambda file: file.stat().st_size))

    def _of(self, *kinds: str) -> Iterator[InjectConfig]:
        return (each for each in self._faults if each.kind in kinds)

    def _tell(self, fault: InjectConfig) -> None:
        where = f" ({fault.phase})" if fault.kind in ("kill", "hang") else ""
        self.say(f"debug.inject: {fault.kind} at step {fault.step} on rank {fault.rank}{where}")


def _work(seconds: float) -> None:
    """Use this thread's processor for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def _flip(file: Path) -> None:
    """Change one bit in the middle of a file, as a bad disk does."""
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        (byte,) = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))
