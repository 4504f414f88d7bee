"""Where a step's time goes: named parts that add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = (
    "data", "forward", "backward", "grad_sync", "tp_comm", "cp_comm", "ep_comm", "pipeline_idle",
    "optimizer", "checkpoint", "evaluation", "other",
)  # fmt: skip


class StepClock:
    """Adds up the time of named parts; what no part claimed is `other`.

    On CUDA the parts are taken between events on the stream, so that nothing waits until the step is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of the block goes to `name`; parts are not nested."""
        if self.on_cuda and name in ("forward", "backward", "optimizer"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self.pending.append((name, begin, end))
            return
        start = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Seconds measured elsewhere."""
        self.parts[name] += seconds

    def finish(self) -> tuple[float, dict[str, float]]:
        """Step time and its parts in seconds since the last finish; starts the next step's clock.

        Device work must be done by then (the loss has been read).
        """
        for name, begin, end in self.pending:
            self.parts[name] += begin.elapsed_time(end) / 1000.0
        self.pending.clear()
        now = time.perf_counter()
        total = now - self.started
        parts = self.parts
        claimed = sum(parts.values())
        hidden = min(parts["data"], max(0.0, claimed - total))  # waiting that the device's work covered
        parts["data"] -= hidden
        parts["other"] = max(0.0, total - (claimed - hidden))
        self.started, self.parts = now, dict.fromkeys(PARTS, 0.0)
        return total, parts
