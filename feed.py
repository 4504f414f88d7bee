"""What the parts of the model on a rank read of the step that is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from data.batch import MicroBatch
from model.transformer import Decoder, LossSums


@dataclass
class Feed:
    """The micro-batches that a pipeline's stages look up by number, and what the last stage gives back."""

    micro_batches: Sequence[MicroBatch] = ()
    """Of the current step."""
    scale: float = 1.0
    """1 / valid tokens of the step."""
    share: float = 1.0
    """1 / all tokens of the step."""
    sums: list[LossSums] = field(default_factory=list)
    """Of each micro-batch, from the last stage."""
    number: int = 0
    """Of the micro-batch whose forward pass began last."""

    def keep(self, sums: LossSums) -> None:
        """Take what the last stage gave, without its graph."""
        self.sums.append(LossSums(*(each.detach() for each in sums)))


Forward = Callable[[Decoder, Tensor | None, MicroBatch, bool], LossSums | Tensor]
"""A part of the decoder on one micro-batch, which is the first of its step or not."""


class FedStage(nn.Module):
    """A part of the decoder as a pipeline calls it: activations and the micro-batch's number."""

    def __init__(self, decoder: Decoder, forward: Forward, feed: Feed) -> None:
        super().__init__()
        self.decoder, self.run, self.feed = decoder, forward, feed

    def forward(self, x: Tensor, mb: Tensor) -> Tensor:
        """x: activations [T/tp, hidden], or anything for the first stage; mb [1]."""
        self.feed.number = int(mb)
        batch = self.feed.micro_batches[self.feed.number]
        out = self.run(self.decoder, None if self.decoder.part.first else x, batch, self.feed.number == 0)
        if not isinstance(out, LossSums):
            return out
        self.feed.keep(out)
        return out.objective
