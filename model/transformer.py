"""The decoder: embedding, pre-norm blocks on x [T/tp, hidden], norm, head; or the part of it on one pipeline stage.

Parameter names are global and say nothing of any layout: `layers.3.attention.qkv.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.attention import Attention, AttentionContext, attention_context
from model.config import ModelConfig
from model.context import BlockContext
from model.loss import LossSettings, chunk_terms, chunked_loss
from model.mlp import MLP
from model.moe import MoE
from model.norm import RMSNorm
from model.rope import inverse_wavelengths
from model.router import Router
from parallel.collectives import gather_tokens
from parallel.cuts import Cuts
from parallel.mesh import Axis
from parallel.recompute import recomputed
from parallel.remade import Recipe, recipe
from parallel.tensor import Linears, VocabularyEmbedding


class LossSums(NamedTuple):
    """What one micro-batch adds to the step."""

    objective: Tensor
    """Differentiable, already divided by the step's valid tokens, and multiplied by the loss scale if there is one."""
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
    """x + attention(norm(x)), then x + mlp(norm(x)); in a sparse block the MLP is a mixture of experts."""

    def __init__(self, config: ModelConfig, cuts: Cuts, layer: int, device: torch.device | None = None) -> None:
        super().__init__()
        sparse = config.moe is not None and config.moe.is_sparse(layer)
        cuts = cuts.of_layer(layer)
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.attention = Attention(config, cuts, device)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, device)
        self.mlp = MoE(config, cuts, device) if sparse else MLP(config, cuts.linears("mlp"), device)
        self.recompute, self.fp8 = False, cuts.fp8

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]."""
        recompute = self.recompute and torch.is_grad_enabled()
        # Inside the module, so that FSDP's hooks stand around both passes and gather the weights for each; not
        # around a mixture, whose experts have hooks of their own and whose choices are not to be made twice.
        first = partial(recomputed, fp8=self.fp8) if recompute else _call
        if isinstance(self.mlp, MoE):
            x, normed = first(self._before_mlp, x, context.attention)
            return x + self.mlp(normed, context)  # type: ignore[no-any-return]
        return first(self._body, x, context.attention)  # type: ignore[no-any-return]

    def _before_mlp(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, context, self._again(normed, self.attention_norm, x))
        return x, self.mlp_norm(x)

    def _body(self, x: Tensor, context: AttentionContext) -> Tensor:
        x, normed = self._before_mlp(x, context)
        return x + self.mlp(normed, self._again(normed, self.mlp_norm, x))  # type: ignore[no-any-return]

    def _again(self, normed: Tensor, norm: RMSNorm, x: Tensor) -> Recipe | None:
        """How norm(x) is made in the backward pass, unless all of the block is."""
        return None if self.recompute else recipe(normed, norm, x)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Without recomputation."""
    return function(*args)


class Decoder(nn.Module):
    """Decoder-only Transformer over packed tokens, whole or one part of it."""

    def __init__(
        self, config: ModelConfig, device: torch.device | None = None, cuts: Cuts | None = None,
        part: Part | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        cuts, part = cuts or Cuts(), part or Part(range(config.layers))
        self.config, self.part, self.cuts, self.axis = config, part, cuts, cuts.tp
        rows, axis = padded_vocabulary(config), cuts.tp
        tied = config.tied_embeddings
        has_table = part.first or (part.last and tied)
        self.embedding = VocabularyEmbedding(rows, config.hidden, axis, device) if has_table else None
        self.layers = nn.ModuleDict({str(number): Block(config, cuts, number, device) for number in part.layers})
        self.norm = RMSNorm(config.hidden, config.norm_eps, device) if part.last else None
        self.head = Linears(axis).column(config.hidden, rows, False, device) if part.last and not tied else None
        head_dim = config.head_dim or config.hidden // config.heads
        self.freq = inverse_wavelengths(head_dim, config.rope_theta, config.rope_scaling)
        self.loss_settings = _loss_settings(config, axis)
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

    @property
    def routers(self) -> dict[int, Router]:
        """Those of this part's sparse blocks, by the number of the block."""
        return {
            int(number): block.mlp.router
            for number, block in self.layers.items()
            if isinstance(block, Block) and isinstance(block.mlp, MoE)
        }

    def reset_buffers(self, device: torch.device) -> None:
        """What is neither a parameter nor loaded, after the memory was made."""
        self.freq = self.freq.to(device)  # here, not in each step: a copy from the host waits
        for router in self.routers.values():
            router.reset_buffers()

    def hidden_states(
        self, x: Tensor, positions: Tensor, cu_seqlens: Tensor, seq_len: int, *, documents: bool, share: float = 0.0,
        loss_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """This part's blocks.

        Args:
            x: tokens [T] for the first part, else [T/tp, hidden] from the part before; T are those of this rank's
                share of each sequence (over cp).
            positions: [T], likewise.
            cu_seqlens: [D + 1], borders in the whole sequences.
            seq_len: tokens of a whole sequence.
            share: 1 / tokens of the step, for losses that are means over all of them.
            loss_scale: [] fp32, what the gradients of all losses are multiplied by; None: by nothing.

        Returns:
            [T/tp, hidden]: after the final norm for the last part.
        """
        if self.part.first and self.embedding is not None:
            x = self.embedding(x)
        attention = attention_context(
            positions, cu_seqlens, seq_len, self.freq,
            dtype=x.dtype, window=self.config.window, documents=documents,
            whole_masks=self.compiled, cp=self.cuts.cp, exchange=self.cuts.exchange,
        )  # fmt: skip
        context = BlockContext(attention, seq_len // self.cuts.cp.size, share, loss_scale)
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
        documents: bool, scale: float, share: float = 0.0, loss_scale: Tensor | None = None,
    ) -> LossSums | Tensor:  # fmt: skip
        """The last part: loss of one micro-batch; others: [T/tp, hidden] for the next part.

        labels [T] with IGNORE; scale = 1 / valid tokens of the step. The rest as in `hidden_states`.
        """
        x = self.hidden_states(
            x, positions, cu_seqlens, seq_len, documents=documents, share=share, loss_scale=loss_scale
        )
        if not self.part.last:
            return x
        x = gather_tokens(x, self.axis)
        weight = scale if loss_scale is None else loss_scale * scale
        return LossSums(*chunked_loss(x, self.head_weight, labels, self.loss_settings, weight, self.loss_terms))


def _loss_settings(config: ModelConfig, axis: Axis) -> LossSettings:
    """The loss over this rank's entries of the vocabulary."""
    rows = padded_vocabulary(config) // axis.size
    offset = axis.rank * rows
    own = min(max((config.vocab_size or 0) - offset, 0), rows)
    return LossSettings(own, config.loss_chunk, config.z_loss, offset, axis)


def set_recompute(model: Decoder, mode: str, every: int) -> None:
    """Which activations are made again in the backward pass (Korthikanti et al., 2022).

    mode: none; selective: between the attention's linears; full: every block; every_n: one block in `every`.
    """
    for number, block in model.layers.items():
        if not isinstance(block, Block):
            continue
        block.attention.recompute = mode == "selective"
        block.recompute = mode == "full" or (mode == "every_n" and int(number) % every == 0)
        if isinstance(block.mlp, MoE):
            block.mlp.recompute = block.mlp.experts.recompute = block.recompute
        for dense in (module for module in block.modules() if isinstance(module, MLP)):
            dense.remakes = not block.recompute  # what is recomputed whole need not be kept in part


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of a weight's initial values; a block's two output linears are damped (GPT-2)."""
    damped = name.endswith(("attention.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight"))
    return config.init_std / math.sqrt(2 * config.layers) if damped else config.init_std


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model as published: padding rows left out, tied weights counted once."""
    model = Decoder(config, torch.device("meta"))
    padding = padded_vocabulary(config) - (config.vocab_size or 0)
    tables = 1 if config.tied_embeddings else 2
    return sum(p.numel() for p in model.parameters()) - padding * config.hidden * tables
