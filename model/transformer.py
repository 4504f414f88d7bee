"""The decoder: embedding, pre-norm blocks on x [T, hidden], norm, head.

Parameter names are global and say nothing of any layout: `layers.3.attention.qkv.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.attention import Attention, AttentionContext, attention_context
from model.config import ModelConfig
from model.init import fill_rectangle, stream_key
from model.loss import LossSettings, chunk_terms, chunked_loss
from model.mlp import MLP
from model.norm import RMSNorm
from model.rope import inverse_wavelengths


@dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to the step."""

    objective: Tensor
    """Differentiable, already divided by the step's valid tokens."""
    cross_entropy: Tensor
    """Sum over valid tokens, nats."""
    z_square: Tensor
    """Sum of logsumexp^2 over valid tokens."""


def padded_vocabulary(config: ModelConfig) -> int:
    """Rows of the embedding and head: vocab_size rounded up to a multiple of vocab_multiple."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is null: fill it in with the tokenizer's before building")
    return math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.attention = Attention(config, device)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.mlp = MLP(config, device)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Decoder-only Transformer over packed tokens."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        rows = padded_vocabulary(config)
        self.embedding = nn.Embedding(rows, config.hidden, device=device)
        self.layers = nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden, rows, bias=False, device=device)
        head_dim = config.head_dim or config.hidden // config.heads
        self.freq = inverse_wavelengths(head_dim, config.rope_theta, config.rope_scaling)
        self.loss_settings = LossSettings(config.vocab_size or rows, config.loss_chunk, config.z_loss)
        self.loss_terms = chunk_terms
        self.compiled = False

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary, hidden]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *, documents: bool,
    ) -> Tensor:  # fmt: skip
        """tokens [T], positions [T], cu_seqlens [D + 1] -> [T, hidden] after the final norm."""
        x = self.embedding(tokens)
        context = attention_context(
            positions, cu_seqlens, seq_len, self.freq.to(x.device),
            dtype=x.dtype, window=self.config.window, documents=documents,
            whole_masks=self.compiled,
        )  # fmt: skip
        for block in self.layers:
            x = block(x, context)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *, documents: bool) -> Tensor:
        """[T, vocab_size] in fp32 (fp64 for an fp64 model), padding cut off."""
        x = self.hidden_states(tokens, positions, cu_seqlens, seq_len, documents=documents)
        logits = nn.functional.linear(x, self.head_weight)[:, : self.loss_settings.vocab_size]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *,
        documents: bool, scale: float,
    ) -> LossSums:  # fmt: skip
        """Loss of one micro-batch; labels [T] with IGNORE, scale = 1 / valid tokens of the step."""
        x = self.hidden_states(tokens, positions, cu_seqlens, seq_len, documents=documents)
        return LossSums(*chunked_loss(x, self.head_weight, labels, self.loss_settings, scale, self.loss_terms))


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of a weight's initial values; a block's two output linears are damped (GPT-2)."""
    damped = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return config.init_std / math.sqrt(2 * config.layers) if damped else config.init_std


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter: norms with one, biases with zero, weights from the hash of (seed, name, index)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                std = initial_std(name, model.config)
                fill_rectangle(parameter, stream_key(seed, name), std, parameter.shape)


def build(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Meta -> materialise -> initialise: a decoder on `device`, weights in `dtype`."""
    model = Decoder(config, torch.device("meta"))
    model = model.to(dtype).to_empty(device=device)
    initialise(model, seed)
    return model


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model as published: padding rows left out, tied weights counted once."""
    with torch.device("meta"):
        model = Decoder(config)
    padding = padded_vocabulary(config) - (config.vocab_size or 0)
    tables = 1 if config.tied_embeddings else 2
    return sum(p.numel() for p in model.parameters()) - padding * config.hidden * tables
