"""Model FLOPs of a training step: the matrix products that the mathematics needs, and no others.

Convention: forward plus backward is three times the forward; causal attention counts its lower triangle;
norms, rotary positions, the softmax and the embedding look-up are left out. Recomputation counts in the
hardware's FLOPs (HFU) only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig


def block_weights(config: ModelConfig) -> int:
    """Multiply-adds a token in one block's linears."""
    head_dim = config.head_dim or config.hidden // config.heads
    q, kv = config.heads * head_dim, config.kv_heads * head_dim
    products = 3 if config.activation == "swiglu" else 2
    return config.hidden * (q + 2 * kv) + q * config.hidden + products * config.hidden * config.ffn


def squared_lengths(cu_seqlens: Tensor, window: int | None) -> int:
    """Twice the query-key pairs of causal segments, to leading order.

    Args:
        cu_seqlens: [D + 1] borders of the segments, in tokens.
        window: sliding window in tokens.

    Returns:
        The sum over segments of L^2, or of 2 w L - w^2 with w = min(L, window).
    """
    length = cu_seqlens.to(torch.int64).diff()
    seen = length if window is None else length.clamp(max=window)
    return int((2 * seen * length - seen * seen).sum())


def recomputed_flops(config: ModelConfig, tokens: int, squared_lengths: int, recompute: str, every: int) -> int:
    """FLOPs of forward products that are made again in a step's backward pass, under train.recompute."""
    head_dim = config.head_dim or config.hidden // config.heads
    pairs = 2 * config.heads * head_dim * squared_lengths  # a block's attention, forward
    block = 2 * tokens * block_weights(config) + pairs
    blocks = {"full": config.layers, "every_n": -(-config.layers // every)}
    return config.layers * pairs if recompute == "selective" else blocks.get(recompute, 0) * block


def step_flops(config: ModelConfig, tokens: int, squared_lengths: int) -> int:
    """FLOPs of forward and backward over a step.

    Args:
        config: with vocab_size filled in.
        tokens: tokens of the step.
        squared_lengths: sum of `squared_lengths` over the step's micro-batches.
    """
    head_dim = config.head_dim or config.hidden // config.heads
    linears = config.layers * block_weights(config) + config.hidden * (config.vocab_size or 0)
    return 6 * tokens * linears + 6 * config.layers * config.heads * head_dim * squared_lengths
