"""Grouped-query attention over packed tokens: the module, and what its layers share in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention_kernels import BLOCK, block_keys, blocked_attention, fused_attention
from model.config import ModelConfig
from model.norm import RMSNorm
from model.rope import rotate, rotation_table
from parallel.tensor import Linears


@dataclass(frozen=True)
class AttentionContext:
    """What every layer needs to know of one micro-batch of `batch` sequences of `seq_len` tokens."""

    batch: int
    """Sequences."""
    seq_len: int
    """Tokens a sequence."""
    cos: Tensor
    """[batch, seq_len, 1, head_dim / 2] rotary cosines."""
    sin: Tensor
    """[batch, seq_len, 1, head_dim / 2] rotary sines."""
    masks: tuple[Tensor, ...]
    """CPU: for each block of query rows, 0 or -inf added to the scores of its last keys
    [batch or 1, 1, rows, 1, keys]."""
    first: Tensor | None
    """CUDA: [batch, seq_len] index in its sequence of the first token each token sees; None: plain causal."""
    cu_seqlens: Tensor | None
    """CUDA: [documents + 1] int32 borders of the attention segments in the folded token dimension. On a CPU
    the masks say it all, and a length that varies would have compiled code made anew."""
    window: int | None
    """Latest tokens a token sees, itself included."""


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
) -> AttentionContext:
    """Prepare what the layers share.

    Args:
        positions: [T] int64, restarting at each sequence and, where documents are masked, each document.
        cu_seqlens: [D + 1] int32, the same borders.
        seq_len: tokens a sequence; T is a multiple of it.
        freq: [head_dim / 2] fp64, radians a token.
        dtype: compute dtype.
        window: sliding window in tokens.
        documents: whether positions may restart inside a sequence (else the cheaper causal form is used).
        whole_masks: masks over all keys of a block, which compiled code adds for nothing, while a part of
            the keys costs it dearly; otherwise plain causal masks cover the diagonal alone.
    """
    batch = len(positions) // seq_len
    cos, sin = (t.view(batch, seq_len, 1, -1) for t in rotation_table(positions, freq, dtype))
    masked = documents or window is not None
    first = _first_seen(positions.view(batch, seq_len), window) if masked else None
    if positions.device.type != "cpu":
        return AttentionContext(batch, seq_len, cos, sin, (), first, cu_seqlens, window)
    if first is None and whole_masks:
        first = _first_seen(torch.arange(seq_len)[None], None)
    masks = _block_masks(first, seq_len, dtype, window)
    return AttentionContext(batch, seq_len, cos, sin, masks, None, None, window)


def _first_seen(positions: Tensor, window: int | None) -> Tensor:
    """[B, S] index of the first token each token sees: its document's start, or the window's edge."""
    back = positions if window is None else positions.clamp(max=window - 1)
    return torch.arange(positions.shape[1], device=positions.device) - back


def _block_masks(first: Tensor | None, seq_len: int, dtype: torch.dtype, window: int | None) -> tuple[Tensor, ...]:
    """One additive mask a block of rows; without documents only the diagonal's triangle."""
    masks: list[Tensor] = []
    for row in range(0, seq_len, BLOCK):
        begin, end = block_keys(row, seq_len, window)
        begin = row if first is None else begin
        query, key = torch.arange(row, end), torch.arange(begin, end)
        hidden = (key > query[:, None])[None]
        if first is not None:
            hidden = hidden | (key < first[:, row:end, None])
        zero = torch.zeros(hidden.shape, dtype=dtype)
        masks.append(zero.masked_fill_(hidden, float("-inf"))[:, None, :, None, :])
    return tuple(masks)


class Attention(nn.Module):
    """x [T/tp, hidden] -> [T/tp, hidden]. The rows of `qkv` are grouped by KV head: its queries, its key, its value.

    With tensor parallelism this rank has kv_heads / tp of the groups, of all tokens.
    """

    def __init__(self, config: ModelConfig, linears: Linears, device: torch.device | None = None) -> None:
        super().__init__()
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

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]."""
        shape = (context.batch, context.seq_len, self.kv_heads, self.group + 2, self.head_dim)
        qkv = self.qkv(self.linears.gather(x)).view(shape)
        if self.recompute and torch.is_grad_enabled():
            core = checkpoint(self._core, qkv, context, use_reentrant=False, preserve_rng_state=False)
        else:
            core = self._core(qkv, context)
        return self.out(core)  # type: ignore[no-any-return]

    def _core(self, qkv: Tensor, context: AttentionContext) -> Tensor:
        """qkv [B, S, kv, g + 2, d] -> [T, kv * g * d]: everything between the two linears."""
        q, k, v = qkv.split([self.group, 1, 1], dim=3)
        k, v = k.squeeze(3), v.squeeze(3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attend = self._blocked if qkv.device.type == "cpu" else self._fused
        return attend(q, k, v, context)

    def _blocked(self, q: Tensor, k: Tensor, v: Tensor, c: AttentionContext) -> Tensor:
        """Heads first, each KV head's queries folded into rows: q [B, kv, S, g, d], k and v [B, kv, S, d]."""
        cos, sin = c.cos.transpose(1, 2), c.sin.transpose(1, 2)
        q = rotate(q.transpose(1, 2), cos[..., None, :], sin[..., None, :], self.head_dim**-0.5)
        k = rotate(k.transpose(1, 2), cos, sin)
        out = blocked_attention(q, k, v.transpose(1, 2).contiguous(), c.masks, c.window)
        return out.transpose(1, 2).reshape(c.batch * c.seq_len, -1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, c: AttentionContext) -> Tensor:
        """q [B, S, kv, g, d], k and v [B, S, kv, d] through PyTorch's fused kernels."""
        q = rotate(q, c.cos[..., None, :], c.sin[..., None, :])
        k = rotate(k, c.cos, c.sin)
        out = fused_attention(q.flatten(2, 3), k, v, cu_seqlens=c.cu_seqlens, first=c.first, window=c.window)
        return out.reshape(c.batch * c.seq_len, -1)
