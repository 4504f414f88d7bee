"""What a training step reads, and how samples of a corpus are packed into it.

samples            |  a0 a1 a2 a3 | b0 b1 c0 c1 |   two samples of 4; document c starts in the second
tokens     [T]        a0 a1 a2 a3   b0 b1 c0 c1
labels     [T]        a1 a2 a3 a4   b1 -- c1 c2     the target after b1 lies in another document
positions  [T]         0  1  2  3    0  1  0  1
cu_seqlens [D + 1]     0  4  6  8                   attention stays inside each segment
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from data.corpus.indexed import Tokens
from data.corpus.joined import Corpus

IGNORE = -100
"""Label of a position without a target."""

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed one after the other: T = samples * seq_len tokens, D attention segments."""

    tokens: torch.Tensor
    """Token ids, [T] int64."""
    labels: torch.Tensor
    """Next token's id, or IGNORE where there is no target, [T] int64."""
    positions: torch.Tensor
    """Place inside the attention segment, from 0, [T] int64."""
    cu_seqlens: torch.Tensor
    """Start of each attention segment, and T at the end, [D + 1] int32."""
    samples: range
    """Global numbers of the samples; fewer than the rows where a validation batch is filled up."""

    @property
    def valid_tokens(self) -> int:
        """Positions with a target."""
        # By numpy: torch would wake its thread pool, beside the training's own work.
        return int(np.count_nonzero(self.labels.numpy() != IGNORE))

    def pinned(self) -> MicroBatch:
        """The same in memory that a GPU reads while the host goes on."""
        return MicroBatch(
            self.tokens.pin_memory(), self.labels.pin_memory(), self.positions.pin_memory(),
            self.cu_seqlens.pin_memory(), self.samples,
        )  # fmt: skip


@dataclass(frozen=True)
class StepBatch:
    """Everything one optimizer step reads."""

    micro_batches: tuple[MicroBatch, ...]
    """In order of their samples, all of one shape."""
    valid_tokens: int
    """Positions with a target: the loss is divided by it."""
    tokens: int
    """All positions."""
    samples: range
    """Global numbers of the samples."""
    passed_over: bool = False
    """Whether they are only counted as read; there are no micro-batches then."""


def step_batch(micro_batches: Sequence[MicroBatch], samples: range) -> StepBatch:
    """A step made of `micro_batches`, which hold `samples`."""
    return StepBatch(
        micro_batches=tuple(micro_batches),
        valid_tokens=sum(micro_batch.valid_tokens for micro_batch in micro_batches),
        tokens=sum(micro_batch.tokens.numel() for micro_batch in micro_batches),
        samples=samples,
    )


Place = tuple[Corpus, int]
"""Where a sample is: its corpus, and the position of its first token in the corpus's stream."""


@dataclass(frozen=True)
class Packer:
    """Cuts samples out of corpora and packs them."""

    seq_len: int
    """Length of a sample, in tokens."""
    document_mask: bool
    """Whether attention segments end at document borders and targets never cross one."""
    vocab_size: int
    """Ids must be below it."""

    def pack(self, places: Sequence[Place], samples: range) -> MicroBatch:
        """One micro-batch of the samples at `places`.

        `samples` are their numbers; where they are fewer than `places`, the rest fills up and gets no
        targets. Raises DataRefused for an id outside the vocabulary, with its position.
        """
        window = self._read(places)  # [rows, seq_len + 1], as on disk
        tokens, labels = window[:, :-1].astype(np.int64), window[:, 1:].astype(np.int64)  # both [rows, seq_len]
        cuts = self._cuts(places)
        # A cut marks the first position of a document, so the label before it belongs to another one.
        labels.reshape(-1)[cuts - 1] = IGNORE
        labels[len(samples) :] = IGNORE
        segments, positions = self._segments(len(places), cuts)
        return MicroBatch(
            tokens=torch.from_numpy(tokens.reshape(-1)),
            labels=torch.from_numpy(labels.reshape(-1)),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(segments.astype(np.int32)),
            samples=samples,
        )

    def _read(self, places: Sequence[Place]) -> Tokens:
        """The samples with one token more each, [rows, seq_len + 1]; refused where one is no id."""
        joined = np.concatenate([corpus.read(start, start + self.seq_len + 1) for corpus, start in places])
        # As unsigned numbers negative ids are large: one pass finds both kinds.
        if joined.view(f"u{joined.itemsize}").max() >= self.vocab_size:
            for corpus, start in places:
                corpus.check_range(start, corpus.read(start, start + self.seq_len + 1), self.vocab_size)
        return joined.reshape(len(places), self.seq_len + 1)

    def _cuts(self, places: Sequence[Place]) -> Array:
        """Document starts as positions in the micro-batch, ascending, [cuts] int64.

        One right behind a sample counts as well (it falls on the next row's start): it takes the last label.
        """
        if not self.document_mask:
            return np.empty(0, np.int64)
        return np.concatenate(
            [
                corpus.borders(start, start + self.seq_len + 1) + (row * self.seq_len - start)
                for row, (corpus, start) in enumerate(places)
            ]
        )

    def _segments(self, count: int, cuts: Array) -> tuple[Array, Array]:
        """Where segments start and the last one ends, [D + 1], and places inside them, [count * seq_len]; int64."""
        rows = np.arange(0, (count + 1) * self.seq_len, self.seq_len)
        if not cuts.size:
            same = np.empty((count, self.seq_len), np.int64)
            same[:] = np.arange(self.seq_len)
            return rows, same.reshape(-1)
        segments = np.unique(np.concatenate([rows, cuts]))
        positions = np.arange(count * self.seq_len)
        positions -= np.repeat(segments[:-1], np.diff(segments))
        return segments, positions
