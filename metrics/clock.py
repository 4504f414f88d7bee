"""Where a step's time goes: named parts that add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

PARTS = (
    "data", "forward", "backward", "grad_sync", "tp_comm", "cp_comm", "ep_comm", "pipeline_idle",
    "optimizer", "checkpoint", "evaluation", "other",
)  # fmt: skip

# Parts that are work of the device; the others are the host's, or wait for the device.
_ON_DEVICE = ("forward", "backward", "optimizer", "grad_sync", "pipeline_idle")


class Listener(Protocol):
    """Is told of the parts of a step as this process comes to them; not of those inside another one."""

    def begins(self, part: str) -> None:
        """A part begins."""

    def ends(self, part: str) -> None:
        """A part has ended without an exception."""


class StepClock:
    """Adds up the time of named parts; what no part claimed is `other`.

    On CUDA the parts are taken between events on the stream, so that nothing waits until the step is read.
    """

    def __init__(self, device: torch.device, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        self.on_cuda = device.type == "cuda"
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event, int]] = []
        self.started = time.perf_counter()
        self.inside = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time of the block goes to `name`; a part inside another one is not counted apart."""
        if self.inside:
            yield
            return
        self.inside = True
        try:
            with self._between(name, None) if self._by_events(name) else self._timed(name), self.telling(name):
                yield
        finally:
            self.inside = False

    @contextmanager
    def telling(self, name: str) -> Iterator[None]:
        """Tell the listeners of a part whose time is not to be counted here."""
        for each in self.listeners:
            each.begins(name)
        yield
        for each in reversed(self.listeners):
            each.ends(name)

    @contextmanager
    def rest(self, name: str) -> Iterator[None]:
        """Time of the block that no part inside it claims goes to `name`."""
        if self._by_events(name):
            with self._between(name, len(self.pending)):
                yield
            return
        before = sum(self.parts.values())
        with self._timed(name):
            yield
        claimed = sum(self.parts.values()) - before
        self.parts[name] -= claimed - self._last

    def _by_events(self, name: str) -> bool:
        return self.on_cuda and name in _ON_DEVICE

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._last = time.perf_counter() - start
        self.parts[name] += self._last

    @contextmanager
    def _between(self, name: str, first_inside: int | None) -> Iterator[None]:
        """Record events around the block; those recorded inside from `first_inside` on are taken off again."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.pending.append((name, begin, end, 0 if first_inside is None else len(self.pending) - first_inside))

    def add(self, name: str, seconds: float) -> None:
        """Seconds measured elsewhere."""
        self.parts[name] += seconds

    def finish(self) -> tuple[float, dict[str, float]]:
        """Step time and its parts in seconds since the last finish; starts the next step's clock.

        Device work must be done by then (the loss has been read).
        """
        lasted: list[float] = []
        for name, begin, end, inside in self.pending:
            lasted.append(begin.elapsed_time(end) / 1000.0)
            self.parts[name] += lasted[-1] - sum(lasted[-1 - inside : -1])
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
