"""Ranks that work slower than their peers, by the time that each of them works itself, not by what it waits.

A host with a hot processor or a tired GPU slows all others down, as these wait for it, and their step times are all
alike. So each rank's own work is compared: the processor time of its training thread in forward, backward and
optimizer. Peers are ranks of one pipeline stage with the same experts, which have the same work; where a rank has none,
it is never named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from parallel.process import Everyone

WINDOW = 60  # steps that are compared together: what disturbs a host for fewer than half of them does not count
_WORK = ("forward", "backward", "optimizer")


class Work:
    """Adds up what this process's training thread works (as metrics.clock.Listener).

    On CUDA it is the time that the thread enqueues work in: a slow host is found so, a slow GPU is not.
    """

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def begins(self, part: str) -> None:
        """A part of the step begins."""
        self._began = time.thread_time()

    def ends(self, part: str) -> None:
        """A part of the step ends."""
        if part in _WORK:
            self.seconds += time.thread_time() - self._began

    def take(self) -> float:
        """Seconds since it was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass(frozen=True)
class Slow:
    """A rank whose work takes longer than its peers'."""

    rank: int
    """The process."""
    ratio: float
    """How many times as long as the median of its peers'."""
    host: str
    """Where it runs."""

    @property
    def words(self) -> str:
        """In a sentence."""
        return f"rank {self.rank} ({self.host}) works {self.ratio:.2f} times as long as its peers"

    @property
    def values(self) -> dict[str, Any]:
        """For the record."""
        return {"rank": self.rank, "ratio": self.ratio, "host": self.host}


class Stragglers:
    """Compares the ranks every few steps, in one small message."""

    def __init__(self, margin: float, rank: int, host: str, peers: Sequence[int], window: int = WINDOW) -> None:
        """margin: times as long as its peers' from which on a rank's work is slow, 0: none is; peers: of every rank the
        number of its set of peers."""
        self.margin, self.rank, self.host, self.peers, self.window = margin, rank, host, peers, window
        self.seconds: list[float] = []
        self.told: dict[int, float] = {}

    def add(self, everyone: Everyone, seconds: float) -> list[Slow]:
        """A step's work of this rank: the ranks that are found slow now, the same on all; every rank must call.

        A rank is told of once, and again when it is slower by the margin still.
        """
        if not self.margin or everyone.world == 1:
            return []
        self.seconds.append(seconds)
        if len(self.seconds) < self.window:
            return []
        own = {"host": self.host, "seconds": [round(each, 6) for each in self.seconds]}
        every = [json.loads(text) for text in everyone.gather(json.dumps(own))]
        self.seconds = []
        found = slow_ranks([each["seconds"] for each in every], self.peers, self.margin)
        new = {rank: ratio for rank, ratio in found.items() if ratio > self.margin * self.told.get(rank, 0.0)}
        self.told = {rank: max(ratio, self.told.get(rank, 0.0)) for rank, ratio in found.items()}
        return [Slow(rank, ratio, every[rank]["host"]) for rank, ratio in new.items()]


def slow_ranks(seconds: Sequence[Sequence[float]], peers: Sequence[int], margin: float) -> Mapping[int, float]:
    """Ranks whose work takes `margin` times as long as their peers', with the ratio.

    In each step a rank is compared with the median of the others among its peers, which takes away what made the step
    longer for all; the median over the steps takes away what disturbed a few.

    Args:
        seconds: [ranks][steps].
        peers: [ranks], the number of each one's set.
    """
    found = {}
    for rank, own in enumerate(seconds):
        others = [each for other, each in enumerate(seconds) if other != rank and peers[other] == peers[rank]]
        if not others:
            continue
        typical = [median(step) for step in zip(*others, strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(own, typical, strict=True) if theirs > 0.0]
        if ratios and (ratio := median(ratios)) >= margin:
            found[rank] = ratio
    return found
