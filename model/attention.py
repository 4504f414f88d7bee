"""Grouped-query attention over packed tokens: the module, and what its layers share in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from model.attention_kernels import NO_BLOCKS, Blocks, blocked_attention, causal_blocks, fused_attention
from model.config import ModelConfig
from model.context_attention import Shared, SharedTokens, attend_shared, share_attention
from model.norm import RMSNorm
from model.rope import rotate, rotation_table
from parallel.context import local_places
from parallel.cuts import Cuts
from parallel.mesh import ALONE, Axis
from parallel.recompute import recomputed
from parallel.remade import Recipe


@dataclass(frozen=True)
class AttentionContext:
    """What every layer needs to know of one micro-batch of `batch` sequences, of each `seq_len` tokens on this rank."""

    batch: int
    """Sequences."""
    seq_len: int
    """Tokens of a sequence on this context-parallel rank."""
    cos: Tensor
    """[batch, seq_len, 1, head_dim / 2] rotary cosines."""
    sin: Tensor
    """[batch, seq_len, 1, head_dim / 2] rotary sines."""
    blocks: Blocks
    """CPU: blocks of query rows with the keys they meet and masks."""
    first: Tensor | None
    """CUDA: [batch, seq_len] index in its sequence of the first token each token sees; None: plain causal."""
    cu_seqlens: Tensor | None
    """CUDA: [documents + 1] int32 borders of the attention segments in the folded token dimension. On a CPU
    the masks say it all, and a length that varies would have compiled code made anew."""
    window: int | None
    """Latest tokens a token sees, itself included."""
    shared: Shared | None = None
    """How keys and values of other context-parallel ranks are met; None: sequences are whole, the fields above hold."""


def attention_context(
    positions: Tensor,
    cu_seqlens: Tensor,
    seq_len: int,
    freq: Tensor,
    *,
    dtype: torch.dtype,
    window: int | None = None,
    documents: bool = True,
    whole_masks: bool = False,
    cp: Axis = ALONE,
    exchange: Literal["ring", "all_gather"] = "ring",
) -> AttentionContext:
    """Prepare what the layers share.

    Args:
        positions: [T / cp] int64 of this rank's tokens (`parallel.context.local_share`), restarting at each sequence
            and, where documents are masked, each document.
        cu_seqlens: [D + 1] int32, the same borders, in all T tokens.
        seq_len: tokens of a whole sequence; T is a multiple of it.
        freq: [head_dim / 2] fp64, radians a token.
        dtype: compute dtype.
        window: sliding window in tokens.
        documents: whether positions may restart inside a sequence (else the cheaper causal form is used).
        whole_masks: masks over all keys of a block, which compiled code adds for nothing, while a part of
            the keys costs it dearly; otherwise plain causal masks cover the diagonal alone.
        cp: the ranks that share each sequence.
        exchange: how they see each other's keys and values.
    """
    own = seq_len // cp.size
    positions = positions.view(-1, own)
    batch, device = len(positions), positions.device
    cos, sin = (t.view(batch, own, 1, -1) for t in rotation_table(positions.flatten(), freq, dtype))
    places = local_places(seq_len, cp, device)
    first = _first_seen(positions, places, window) if documents or window is not None else None
    if cp.size > 1:
        tokens = SharedTokens(positions, cu_seqlens, seq_len, first, window, cp)
        shared = share_attention(tokens, exchange, dtype, 2 * len(freq))
        return AttentionContext(batch, own, cos, sin, NO_BLOCKS, None, None, window, shared)
    if device.type != "cpu":
        return AttentionContext(batch, own, cos, sin, NO_BLOCKS, first, cu_seqlens, window)
    if first is None and whole_masks:
        first = torch.zeros(1, seq_len, dtype=torch.int64)
    blocks = causal_blocks(places, places, first, window, dtype, chunk=seq_len, trim=False)
    return AttentionContext(batch, own, cos, sin, blocks, None, None, window)


def _first_seen(positions: Tensor, places: Tensor, window: int | None) -> Tensor:
    """[B, S] place of the first token each token sees: its document's start, or the window's edge."""
    return places - (positions if window is None else positions.clamp(max=window - 1))


class Attention(nn.Module):
    """x [T/tp, hidden] -> [T/tp, hidden]. The rows of `qkv` are grouped by KV head: its queries, its key, its value.

    With tensor parallelism this rank has kv_heads / tp of the groups, of all tokens.
    """

    def __init__(self, config: ModelConfig, cuts: Cuts, device: torch.device | None = None) -> None:
        super().__init__()
        linears = cuts.linears("attention")
        self.kv_heads = config.kv_heads // linears.axis.size
        self.group = config.heads // config.kv_heads
        self.head_dim = config.head_dim or config.hidden // config.heads
        self.linears = linears
        rows = config.kv_heads * (self.group + 2) * self.head_dim
        width = config.heads * self.head_dim
        self.qkv = linears.column(config.hidden, rows, config.bias, device)
        self.out = linears.row(width, config.hidden, config.bias, device)
        norm = config.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, device) if norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, device) if norm else None
        self.recompute = False

    def forward(self, x: Tensor, context: AttentionContext, again: Recipe | None = None) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]; `again` is kept instead of x."""
        shape = (context.batch, context.seq_len, self.kv_heads, self.group + 2, self.head_dim)
        qkv = self.qkv(self.linears.gather(x), again).view(shape)
        if self.recompute and torch.is_grad_enabled():
            core = recomputed(self._core, qkv, context)
        else:
            core = self._core(qkv, context)
        return self.out(core)  # type: ignore[no-any-return]

    def _core(self, qkv: Tensor, context: AttentionContext) -> Tensor:
        """qkv [B, S, kv, g + 2, d] -> [T, kv * g * d]: everything between the two linears."""
        q, k, v = qkv.split([self.group, 1, 1], dim=3)
        k, v = k.squeeze(3), v.squeeze(3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads_first = qkv.device.type == "cpu" if context.shared is None else context.shared.heads_first
        return self._blocked(q, k, v, context) if heads_first else self._fused(q, k, v, context)

    def _blocked(self, q: Tensor, k: Tensor, v: Tensor, c: AttentionContext) -> Tensor:
        """Heads first, each KV head's queries folded into rows: q [B, kv, S, g, d], k and v [B, kv, S, d]."""
        cos, sin = c.cos.transpose(1, 2), c.sin.transpose(1, 2)
        q = rotate(q.transpose(1, 2), cos[..., None, :], sin[..., None, :], self.head_dim**-0.5)
        k = rotate(k.transpose(1, 2), cos, sin)
        v = v.transpose(1, 2).contiguous()
        out = blocked_attention(q, k, v, c.blocks) if c.shared is None else attend_shared(q, k, v, c.shared)
        return out.transpose(1, 2).reshape(c.batch * c.seq_len, -1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, c: AttentionContext) -> Tensor:
        """q [B, S, kv, g, d], k and v [B, S, kv, d] through PyTorch's fused kernels."""
        q = rotate(q, c.cos[..., None, :], c.sin[..., None, :])
        k = rotate(k, c.cos, c.sin)
        q = q.flatten(2, 3)
        if c.shared is None:
            out = fused_attention(q, k, v, cu_seqlens=c.cu_seqlens, first=c.first, window=c.window)
        else:
            out = attend_shared(q, k, v, c.shared)
        return out.reshape(c.batch * c.seq_len, -1)
