"""From the number of a global sample to its tokens: phase, source, and place in the source's own order.

sample n   ->   phase: the last one that begins at or before n
           ->   source, and how many of its samples come before (mixture), on top of its cursor when the phase began
           ->   start in the source's stream (order)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.batch import Place
from data.corpus.joined import Corpus
from data.mixture import Mixture
from data.order import SampleOrder


@dataclass(frozen=True)
class Source:
    """A corpus whose samples are read in an order of its own."""

    name: str
    """In metrics, in checkpoints and in the order's key."""
    corpus: Corpus
    """Its tokens."""
    seed: int
    """Of the order."""

    def order(self, seq_len: int) -> SampleOrder:
        """Its samples of seq_len tokens, shuffled by (seed, name, epoch)."""
        return SampleOrder(self.corpus.tokens, seq_len, self.seed, self.name)


@dataclass(frozen=True)
class Phase:
    """A mixture that holds from some sample on."""

    first: int
    """Number of its first sample."""
    counts: Mapping[str, int]
    """Samples of each source in a period; a source that is not there gives none."""
    seq_len: int
    """Tokens a sample."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the sources that give any samples, the part of them that each gives."""
        return {name: count / sum(self.counts.values()) for name, count in self.counts.items()}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Phase:
        """A phase from what `dataclasses.asdict` made of it."""
        return Phase(record["first"], dict(record["counts"]), record["seq_len"])


@dataclass(frozen=True)
class _Started:
    """A phase, with where each source stands as it begins."""

    phase: Phase
    mixture: Mixture
    names: tuple[str, ...]
    cursors: Mapping[str, int]


class Samples:
    """The samples of a run, from 0 on; any one is found by arithmetic.

    Where a phase has samples of another length than the one before, each source begins its next epoch there: chunks
    of two lengths overlap, so that the rest of the epoch that was begun cannot be told from what was read.
    """

    def __init__(self, sources: Sequence[Source], phases: Sequence[Phase]) -> None:
        """phases: by ascending first sample, the first one at 0; those of the past may name sources that are gone."""
        self.sources = tuple(sources)
        self._firsts = [phase.first for phase in phases]
        if not phases or self._firsts[0] != 0 or sorted(set(self._firsts)) != self._firsts:
            raise ValueError(f"phases must begin at ascending samples, the first at 0, not at {self._firsts}")
        self._orders: dict[tuple[str, int], SampleOrder] = {}
        self._corpora = {each.name: each.corpus for each in sources}
        cursors: dict[str, int] = {}
        self._phases: list[_Started] = []
        for phase in phases:
            if self._phases:
                cursors = self._converted(self._after(self._phases[-1], phase.first), phase)
            self._phases.append(_Started(phase, Mixture(list(phase.counts.values())), tuple(phase.counts), cursors))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All of them."""
        return tuple(each.phase for each in self._phases)

    def place(self, sample: int) -> Place:
        """Where a sample is."""
        return self.places([sample])[0]

    def places(self, samples: Sequence[int]) -> list[Place]:
        """Where samples are; many are found much faster together."""
        numbers = np.asarray(samples, np.int64)
        phases = np.searchsorted(self._firsts, numbers, "right") - 1
        found: list[Place | None] = [None] * len(numbers)
        for number in np.unique(phases).tolist():
            started, own = self._phases[number], np.flatnonzero(phases == number)
            sources, before = started.mixture.places(numbers[own] - started.phase.first)
            for source in np.unique(sources).tolist():
                name, of_source = started.names[source], sources == source
                order, cursor = self._order(name, started.phase.seq_len), started.cursors.get(name, 0)
                starts = order.starts(before[of_source] + cursor).tolist()
                for at, start in zip(own[of_source].tolist(), starts, strict=True):
                    found[at] = (self._corpora[name], start)
        return [each for each in found if each is not None]

    def cursors(self, sample: int) -> dict[str, int]:
        """Samples of each source before `sample`, in samples of the length that holds there."""
        return self._after(self._started(sample), sample)

    def epochs(self, sample: int) -> dict[str, float]:
        """How many times each source has been read before `sample`."""
        cursors, length = self.cursors(sample), self.seq_len(sample)
        read = {each.name: cursors.get(each.name, 0) for each in self.sources}
        return {
            name: count / self._order(name, length).samples_per_epoch if count else 0.0 for name, count in read.items()
        }

    def shares(self, sample: int) -> dict[str, float]:
        """Those of the mixture that holds at a sample."""
        return self._started(sample).phase.shares

    def seq_len(self, sample: int) -> int:
        """Tokens of a sample."""
        return self._started(sample).phase.seq_len

    def past(self, sample: int) -> tuple[Phase, ...]:
        """The phases of the first `sample` samples."""
        return tuple(each for each in self.phases if each.first < sample)

    def _started(self, sample: int) -> _Started:
        return self._phases[bisect_right(self._firsts, sample) - 1]

    @staticmethod
    def _after(started: _Started, sample: int) -> dict[str, int]:
        counts = started.mixture.before(sample - started.phase.first)
        own = dict(zip(started.names, counts, strict=True))
        return {name: started.cursors.get(name, 0) + own.get(name, 0) for name in {**started.cursors, **own}}

    def _converted(self, cursors: dict[str, int], phase: Phase) -> dict[str, int]:
        """Where each source stands as a phase begins; those that are gone stand still."""
        before = self._phases[-1].phase.seq_len
        if phase.seq_len == before:
            return cursors
        converted = dict(cursors)
        for name in {name for name, cursor in cursors.items() if cursor} & self._corpora.keys():
            epochs = -(-cursors[name] // self._order(name, before).samples_per_epoch)
            converted[name] = epochs * self._order(name, phase.seq_len).samples_per_epoch
        return converted

    def _order(self, name: str, seq_len: int) -> SampleOrder:
        """Made when asked for: a source that was never read at a length may be too short for it."""
        if (name, seq_len) not in self._orders:
            (source,) = (each for each in self.sources if each.name == name)
            self._orders[name, seq_len] = source.order(seq_len)
        return self._orders[name, seq_len]


def samples_of(source: Source, seq_len: int) -> Samples:
    """Those of one source alone."""
    return Samples([source], [Phase(0, {source.name: 1}, seq_len)])


def going_on(history: Sequence[Phase], planned: Sequence[Phase], sample: int) -> list[Phase]:
    """The phases of a run that goes on at `sample`: what was, then what is planned now.

    A mixture that is no longer the one in force begins a phase of its own at `sample`, so that no source loses its
    place.

    Args:
        history: phases that the run has gone through so far.
        planned: phases of its present configuration.
    """
    past = [phase for phase in history if phase.first < sample]
    future = [phase for phase in planned if phase.first >= sample]
    if not past or (future and future[0].first == sample):
        return past + future if past else list(planned)
    now = [phase for phase in planned if phase.first < sample][-1]
    same = (dict(now.counts), now.seq_len) == (dict(past[-1].counts), past[-1].seq_len)
    return [*past, *([] if same else [Phase(sample, now.counts, now.seq_len)]), *future]
