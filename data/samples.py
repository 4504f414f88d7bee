"""From the number of a global sample to its tokens: phase, source, and place in the source's own order.

sample n   ->   phase: the last one that begins at or before n
           ->   source, and how many of its samples come before (mixture), on top of its cursor when the phase began
           ->   start in the source's stream (order)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data.indexed import IndexedCorpus
from data.mixture import Mixture
from data.order import SampleOrder


@dataclass(frozen=True)
class Source:
    """A corpus and the order in which its samples are read."""

    name: str
    """In metrics, in checkpoints and in the order's key."""
    corpus: IndexedCorpus
    """Its tokens."""
    order: SampleOrder
    """Its samples."""

    @staticmethod
    def of(name: str, corpus: IndexedCorpus, seq_len: int, seed: int) -> Source:
        """The source with the order of a run: samples of seq_len tokens, shuffled by (seed, name, epoch)."""
        return Source(name, corpus, SampleOrder(corpus.tokens, seq_len, seed, name))


@dataclass(frozen=True)
class Phase:
    """A mixture that holds from some sample on."""

    first: int
    """Number of its first sample."""
    counts: Mapping[str, int]
    """Samples of each source in a period; a source that is not there gives none."""


@dataclass(frozen=True)
class _Started:
    """A phase, with where each source stands as it begins."""

    phase: Phase
    mixture: Mixture
    names: tuple[str, ...]
    cursors: Mapping[str, int]


class Samples:
    """The samples of a run, from 0 on; any one is found by arithmetic."""

    def __init__(self, sources: Sequence[Source], phases: Sequence[Phase]) -> None:
        """phases: by ascending first sample, the first one at 0; those of the past may name sources that are gone."""
        self._sources = {source.name: source for source in sources}
        self._firsts = [phase.first for phase in phases]
        if not phases or self._firsts[0] != 0 or sorted(set(self._firsts)) != self._firsts:
            raise ValueError(f"phases must begin at ascending samples, the first at 0, not at {self._firsts}")
        cursors: dict[str, int] = {}
        self._phases: list[_Started] = []
        for phase in phases:
            if self._phases:
                cursors = self._after(self._phases[-1], phase.first)
            self._phases.append(_Started(phase, Mixture(list(phase.counts.values())), tuple(phase.counts), cursors))

    def place(self, sample: int) -> tuple[IndexedCorpus, int]:
        """The corpus of a sample, and where in its stream the sample starts."""
        started = self._phases[bisect_right(self._firsts, sample) - 1]
        number, before = started.mixture.place(sample - started.phase.first)
        source = self._sources[started.names[number]]
        return source.corpus, source.order.start(started.cursors.get(source.name, 0) + before)

    def cursors(self, sample: int) -> dict[str, int]:
        """Samples of each source among the first `sample`."""
        return self._after(self._phases[bisect_right(self._firsts, sample) - 1], sample)

    def epochs(self, sample: int) -> dict[str, float]:
        """How many times each source has been read by the first `sample` samples."""
        cursors = self.cursors(sample)
        return {name: cursors.get(name, 0) / each.order.samples_per_epoch for name, each in self._sources.items()}

    @property
    def sources(self) -> tuple[Source, ...]:
        """Those that can be read."""
        return tuple(self._sources.values())

    @staticmethod
    def _after(started: _Started, sample: int) -> dict[str, int]:
        counts = started.mixture.before(sample - started.phase.first)
        own = dict(zip(started.names, counts, strict=True))
        return {name: started.cursors.get(name, 0) + own.get(name, 0) for name in {**started.cursors, **own}}


def samples_of(source: Source) -> Samples:
    """Those of one source alone."""
    return Samples([source], [Phase(0, {source.name: 1})])


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
    begins = [] if dict(now.counts) == dict(past[-1].counts) else [Phase(sample, now.counts)]
    return [*past, *begins, *future]
