"""The decoder: embedding, pre-norm blocks on x [T/tp, hidden], norm, head; or the part of it on one pipeline stage.

Parameter names are global and say nothing of any layout: `layers.3.attention.qkv.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Attention, AttentionContext, attention_context
from model.config import ModelConfig
from model.loss import LossSettings, chunk_terms, chunked_loss
from model.mlp import MLP
from model.norm import RMSNorm
from model.rope import inverse_wavelengths
from parallel.collectives import gather_tokens
from parallel.tensor import Linears, VocabularyEmbedding


class LossSums(NamedTuple):
    """What one micro-batch adds to the step."""

    objective: Tensor
    """Differentiable, already divided by the step's valid tokens."""
    cross_entropy: Tensor
    """Sum over valid tokens, nats."""
    z_square: Tensor
    """Sum of logsumexp^2 over valid tokens."""


@dataclass(frozen=True)
class Part:
    """What of the decoder a module holds."""

    layers: range
    """Numbers of its blocks."""
    first: bool = True
    """Whether it begins with the embedding."""
    last: bool = True
    """Whether it ends with the norm, the head and the loss."""


def padded_vocabulary(config: ModelConfig) -> int:
    """Rows of the embedding and head: vocab_size rounded up to a multiple of vocab_multiple."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size is null: fill it in with the tokenizer's before building")
    return math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, linears: Linears, device: torch.device | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.attention = Attention(config, linears, device)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.mlp = MLP(config, linears, device)
        self.recompute = False

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._body(x, context)
        # Inside the module, so that FSDP's hooks stand around both passes and gather the weights for each.
        return checkpoint(self._body, x, context, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _body(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Decoder-only Transformer over packed tokens, whole or one part of it."""

    def __init__(
        self, config: ModelConfig, device: torch.device | None = None, linears: Linears | None = None,
        part: Part | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        linears, part = linears or Linears(), part or Part(range(config.layers))
        self.config, self.part, self.axis = config, part, linears.axis
        rows, axis = padded_vocabulary(config), linears.axis
        tied = config.tied_embeddings
        has_table = part.first or (part.last and tied)
        self.embedding = VocabularyEmbedding(rows, config.hidden, axis, device) if has_table else None
        self.layers = nn.ModuleDict({str(number): Block(config, linears, device) for number in part.layers})
        self.norm = RMSNorm(config.hidden, config.norm_eps, device) if part.last else None
        self.head = Linears(axis).column(config.hidden, rows, False, device) if part.last and not tied else None
        head_dim = config.head_dim or config.hidden // config.heads
        self.freq = inverse_wavelengths(head_dim, config.rope_theta, config.rope_scaling)
        self.loss_settings = _loss_settings(config, linears)
        self.loss_terms = chunk_terms
        self.compiled = False

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return [block for block in self.layers.values() if isinstance(block, Block)]

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tp, hidden]; only the last part has it."""
        owner = self.head or self.embedding
        if owner is None:
            raise ValueError("this part of the decoder has no head")
        return owner.weight

    def hidden_states(
        self, x: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *, documents: bool,
    ) -> Tensor:  # fmt: skip
        """This part's blocks.

        Args:
            x: tokens [T] for the first part, else [T/tp, hidden] from the part before.
            positions, cu_seqlens: [T], [D + 1].

        Returns:
            [T/tp, hidden]: after the final norm for the last part.
        """
        if self.part.first and self.embedding is not None:
            x = self.embedding(x)
        context = attention_context(
            positions, cu_seqlens, seq_len, self.freq,
            dtype=x.dtype, window=self.config.window, documents=documents,
            whole_masks=self.compiled,
        )  # fmt: skip
        for block in self.layers.values():
            x = block(x, context)
        return x if self.norm is None else self.norm(x)

    def logits(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *, documents: bool) -> Tensor:
        """[T, vocab_size] in fp32 (fp64 for an fp64 model), padding cut off; of a whole decoder on one rank."""
        x = self.hidden_states(tokens, positions, cu_seqlens, seq_len, documents=documents)
        logits = nn.functional.linear(x, self.head_weight)[:, : self.loss_settings.vocab_size]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def forward(
        self, x: Tensor, labels: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *,
        documents: bool, scale: float,
    ) -> LossSums | Tensor:  # fmt: skip
        """The last part: loss of one micro-batch; others: [T/tp, hidden] for the next part.

        labels [T] with IGNORE; scale = 1 / valid tokens of the step.
        """
        x = self.hidden_states(x, positions, cu_seqlens, seq_len, documents=documents)
        if not self.part.last:
            return x
        x = gather_tokens(x, self.axis)
        return LossSums(*chunked_loss(x, self.head_weight, labels, self.loss_settings, scale, self.loss_terms))


def _loss_settings(config: ModelConfig, linears: Linears) -> LossSettings:
    """The loss over this rank's entries of the vocabulary."""
    rows = padded_vocabulary(config) // linears.axis.size
    offset = linears.axis.rank * rows
    own = min(max((config.vocab_size or 0) - offset, 0), rows)
    return LossSettings(own, config.loss_chunk, config.z_loss, offset, linears.axis)


def set_recompute(model: Decoder, mode: str, every: int) -> None:
    """Which activations are made again in the backward pass (Korthikanti et al., 2022).

    mode: none; selective: between the attention's linears; full: every block; every_n: one block in `every`.
    """
    for number, block in model.layers.items():
        if not isinstance(block, Block):
            continue
        block.attention.recompute = mode == "selective"
        block.recompute = mode == "full" or (mode == "every_n" and int(number) % every == 0)


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of a weight's initial values; a block's two output linears are damped (GPT-2)."""
    damped = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return config.init_std / math.sqrt(2 * config.layers) if damped else config.init_std


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model as published: padding rows left out, tied weights counted once."""
    model = Decoder(config, torch.device("meta"))
    padding = padded_vocabulary(config) - (config.vocab_size or 0)
    tables = 1 if config.tied_embeddings else 2
    return sum(p.numel() for p in model.parameters()) - padding * config.hidden * tables
