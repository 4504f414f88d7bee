"""Model FLOPs of a training step: the matrix products that the mathematics needs, and no others.

Convention: forward plus backward is three times the forward; causal attention counts its lower triangle;
norms, rotary positions, the softmax and the embedding look-up are left out. Recomputation counts in the
hardware's FLOPs (HFU) only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig


def layer_weights(config: ModelConfig, layer: int) -> int:
    """Multiply-adds a token in the linears of the block of this number; of its experts, those that a token uses."""
    head_dim = config.head_dim or config.hidden // config.heads
    q, kv = config.heads * head_dim, config.kv_heads * head_dim
    moe, width = config.moe, config.ffn
    if moe is not None and moe.is_sparse(layer):
        width = moe.top_k * moe.ffn + moe.shared_ffn
    return config.hidden * (q + 2 * kv) + q * config.hidden + _products(config) * config.hidden * width


def inactive_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not use, in all layers."""
    moe = config.moe
    if moe is None:
        return 0
    unused = (moe.experts - moe.top_k) * _products(config) * config.hidden * moe.ffn
    return unused * sum(moe.is_sparse(layer) for layer in range(config.layers))


def _products(config: ModelConfig) -> int:
    """Matrices of an MLP."""
    return 3 if config.activation == "swiglu" else 2


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
    if recompute == "selective":
        return config.layers * pairs
    steps = {"full": 1, "every_n": every}
    again = range(0, config.layers, steps[recompute]) if recompute in steps else range(0)
    return sum(2 * tokens * layer_weights(config, layer) + pairs for layer in again)


def step_flops(config: ModelConfig, tokens: int, squared_lengths: int) -> int:
    """FLOPs of forward and backward over a step; a router's are left out.

    Args:
        config: with vocab_size filled in.
        tokens: tokens of the step.
        squared_lengths: sum of `squared_lengths` over the step's micro-batches.
    """
    head_dim = config.head_dim or config.hidden // config.heads
    blocks = sum(layer_weights(config, layer) for layer in range(config.layers))
    linears = blocks + config.hidden * (config.vocab_size or 0)
    return 6 * tokens * linears + 6 * config.layers * config.heads * head_dim * squared_lengths
