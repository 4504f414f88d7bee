"""What every block needs to know of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.attention import AttentionContext


@dataclass(frozen=True)
class BlockContext:
    """Shared by the layers in one forward pass."""

    attention: AttentionContext
    """Masks and rotary angles."""
    seq_len: int
    """Tokens of a sequence on this context-parallel rank."""
    share: float
    """1 / tokens of the step: what a token weighs in losses that are means over all tokens."""
    loss_scale: Tensor | None = None
    """[] fp32, what the gradients of all losses are multiplied by; None: by nothing."""
