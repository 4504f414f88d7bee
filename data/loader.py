"""Batches in the order of a run: training steps made ahead by a thread, and validation micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType

from data.batch import IGNORE, MicroBatch, Packer, Place, StepBatch, step_batch
from data.corpus.joined import Corpus
from data.order import SampleOrder
from data.prefetch import Prefetcher
from data.ramp import PlannedStep
from data.samples import Samples
from errors import DataRefused

_FOUND_TOGETHER = 512  # samples

__all__ = ["IGNORE", "MicroBatch", "StepBatch", "TrainLoader", "validation_batches"]


class TrainLoader(AbstractContextManager["TrainLoader"]):
    """Makes the steps of a run; a step's content depends on its sample numbers alone.

    So does a micro-batch's: put together, the micro-batches of a step on all ranks are the same for every
    `micro_batch` and number of ranks, and a run resumes by planning on from where it stands. Of each `ranks *
    micro_batch` samples in turn, `rank` gets its share. `micro_batch` in samples, `prefetch` in steps made ahead.
    Raises DataRefused when `micro_batch * ranks` does not divide one of the `sizes` of steps.
    """

    def __init__(
        self,
        source: Samples,
        *,
        sizes: Sequence[int],
        micro_batch: int,
        document_mask: bool,
        vocab_size: int,
        prefetch: int = 2,
        rank: int = 0,
        ranks: int = 1,
        pin: bool = False,
    ) -> None:
        for size in sizes:
            _check_sizes(size, micro_batch, ranks, prefetch)
        self._source = source
        self._micro_batch, self._prefetch = micro_batch, prefetch
        self._rank, self._ranks, self._pin = rank, ranks, pin
        self._document_mask, self._vocab_size = document_mask, vocab_size
        self._ahead: Prefetcher[StepBatch] | None = None
        self._wait_seconds = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread that works ahead; the loader can be started again."""
        if self._ahead:
            self._ahead.close()

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for a step since the last `take_wait`."""
        return self._wait_seconds

    def take_wait(self) -> float:
        """`wait_seconds`, which starts again from 0."""
        seconds, self._wait_seconds = self._wait_seconds, 0.0
        return seconds

    def steps(self, plan: Iterable[PlannedStep]) -> Iterator[StepBatch]:
        """The planned steps; one that is passed over has no micro-batches.

        A second call ends the first one's iteration. Raises DataRefused, while iterating, for an id outside the
        vocabulary.
        """
        self.close()
        self._ahead = Prefetcher(self._made(plan), self._prefetch)
        return self._timed(self._ahead)

    def _timed(self, ahead: Prefetcher[StepBatch]) -> Iterator[StepBatch]:
        with ahead:
            while True:
                asked = time.perf_counter()
                step = next(ahead, None)
                self._wait_seconds += time.perf_counter() - asked
                if step is None:
                    return
                yield step

    def _made(self, plan: Iterable[PlannedStep]) -> Iterator[StepBatch]:
        """The steps, the places of many of them found at once."""
        for block in _blocks(plan):
            parts = [self._parts(each) for each in block]
            places = iter(self._source.places([n for own in parts for part in own for n in part]))
            for planned, own in zip(block, parts, strict=True):
                yield self._step(planned, own, places)

    def _parts(self, planned: PlannedStep) -> list[range]:
        """This rank's samples of a step, by micro-batch."""
        if planned.passed_over:
            return []
        samples, size = planned.samples, self._micro_batch
        own = range(self._rank * size, len(samples), self._ranks * size)
        return [samples[at : at + size] for at in own]

    def _step(self, planned: PlannedStep, parts: Sequence[range], places: Iterator[Place]) -> StepBatch:
        samples = planned.samples
        if planned.passed_over:
            return StepBatch((), 0, 0, samples, passed_over=True)
        # Of one step all samples have one length: phases that change it begin where a run is started again.
        packer = Packer(self._source.seq_len(samples.start), self._document_mask, self._vocab_size)
        micro_batches = [packer.pack(list(islice(places, len(part))), part) for part in parts]
        return step_batch([each.pinned() for each in micro_batches] if self._pin else micro_batches, samples)


def _blocks(plan: Iterable[PlannedStep]) -> Iterator[list[PlannedStep]]:
    """Steps in a row, enough of them that finding their places costs little a sample."""
    block: list[PlannedStep] = []
    for planned in plan:
        block.append(planned)
        if sum(len(each.samples) for each in block) >= _FOUND_TOGETHER:
            yield block
            block = []
    if block:
        yield block


def validation_batches(
    corpus: Corpus, *, seq_len: int, micro_batch: int, samples: int, document_mask: bool, vocab_size: int,
    rank: int = 0, ranks: int = 1, group: int = 1,
) -> Iterator[tuple[MicroBatch, ...]]:  # fmt: skip
    """This rank's share of the first `samples` chunks of a held-out corpus (all, if fewer) in natural order.

    Comes in groups of `group` micro-batches, as many groups on every rank, every micro-batch of `micro_batch`
    rows: what is missing at the end is filled up by repeating the last sample without targets, so that neither
    shapes nor the loss depend on `micro_batch` or `ranks`. Raises DataRefused for a corpus shorter than one
    sample, or an id outside the vocabulary.
    """
    order = SampleOrder(corpus.tokens, seq_len, seed=0, source=str(corpus.prefix), shuffle=False)
    packer = Packer(seq_len, document_mask, vocab_size)
    count = min(samples, order.samples_per_epoch)
    for begin in range(0, count, group * ranks * micro_batch):
        firsts = (begin + (number * ranks + rank) * micro_batch for number in range(group))
        yield tuple(_held_out(packer, corpus, order, first, micro_batch, count) for first in firsts)


def _held_out(
    packer: Packer, corpus: Corpus, order: SampleOrder, first: int, rows: int, count: int
) -> MicroBatch:  # fmt: skip
    """Samples [first, first + rows) of a corpus of which `count` are read."""
    part = range(min(first, count), min(first + rows, count))
    return packer.pack([(corpus, order.start(min(first + row, count - 1))) for row in range(rows)], part)


def _check_sizes(global_batch: int, micro_batch: int, ranks: int, prefetch: int) -> None:
    if micro_batch < 1 or global_batch < 1 or global_batch % (micro_batch * ranks):
        raise DataRefused(
            f"train.global_batch={global_batch} must be a multiple of train.micro_batch={micro_batch} times the "
            f"{ranks} data-parallel ranks, each at least 1: change one of them"
        )
    if prefetch < 0:
        raise DataRefused(f"data.prefetch={prefetch} must be at least 0: set 2, or 0 for no thread")
