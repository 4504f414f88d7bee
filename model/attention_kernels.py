"""The attention product itself: causal blocks for CPUs, PyTorch's fused kernels elsewhere.

On a CPU, SDPA's flash kernel spends as long on a causal mask as on none at short sequences; here each block
of query rows meets only the keys up to its end, and the query heads that share a KV head are folded into
the rows of one product.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # query rows a block
_KEEP_UP_TO = 1024  # longest sequence whose probabilities are kept for the backward pass, in tokens


def block_keys(row: int, seq_len: int, window: int | None) -> tuple[int, int]:
    """Keys that the block of query rows beginning at `row` may see: [begin, end)."""
    return (0 if window is None else max(0, row - window + 1)), min(row + BLOCK, seq_len)


def _probabilities(q: Tensor, k: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Softmax of q k^T + mask: q [B*kv, rows*g, d], k [B*kv, keys, d] -> [B*kv, rows*g, keys].

    `shape` is (B, kv, rows, g, keys), in whose last keys the mask broadcasts.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    masked = scores.view(shape)
    if mask.shape[-1] < masked.shape[-1]:
        masked = masked[..., -mask.shape[-1] :]
    masked.add_(mask)
    return torch.softmax(scores, -1)


class _Blocked(torch.autograd.Function):
    """Forward keeps each block's probabilities, or makes them again in backward for long sequences."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, *masks: Tensor) -> Tensor:
        """See `blocked_attention`."""
        batch, heads, seq_len, group, dim = q.shape
        qf, kf, vf = q.reshape(-1, seq_len * group, dim), k.reshape(-1, seq_len, dim), v.reshape(-1, seq_len, dim)
        out = torch.empty_like(qf)
        keep, kept = seq_len <= _KEEP_UP_TO, []
        for mask, row in zip(masks, range(0, seq_len, BLOCK), strict=True):
            begin, end = block_keys(row, seq_len, window)
            rows = slice(row * group, end * group)
            p = _probabilities(qf[:, rows], kf[:, begin:end], mask, (batch, heads, end - row, group, end - begin))
            out[:, rows] = torch.bmm(p, vf[:, begin:end])
            kept += [p] if keep else []
        ctx.save_for_backward(qf, kf, vf, *(kept if keep else masks))
        ctx.geometry = (q.shape, window, keep)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; those of k and v add up over the blocks in fp32 at least."""
        qf, kf, vf, *saved = ctx.saved_tensors
        (batch, heads, seq_len, group, dim), window, kept = ctx.geometry
        gf = grad.reshape(qf.shape)
        dq = torch.empty_like(qf)
        wide = torch.promote_types(qf.dtype, torch.float32)  # several blocks add into one key
        dk, dv = (torch.zeros_like(kf, dtype=wide) for _ in range(2))
        for item, row in zip(saved, range(0, seq_len, BLOCK), strict=True):
            begin, end = block_keys(row, seq_len, window)
            rows, keys = slice(row * group, end * group), slice(begin, end)
            shape = (batch, heads, end - row, group, end - begin)
            p = item if kept else _probabilities(qf[:, rows], kf[:, keys], item, shape)
            dp = torch.bmm(gf[:, rows], vf[:, keys].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, rows] = torch.bmm(ds, kf[:, keys])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), qf[:, rows])
            dv[:, keys] += torch.bmm(p.transpose(1, 2), gf[:, rows])
        full = (batch, heads, seq_len, dim)
        return (
            dq.view(batch, heads, seq_len, group, dim), dk.to(kf.dtype).view(full), dv.to(vf.dtype).view(full),
            None, *[None] * len(saved),
        )  # fmt: skip


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor, ...], window: int | None = None) -> Tensor:
    """Causal attention by blocks of query rows.

    Args:
        q: [B, kv, S, g, d], already scaled and rotated.
        k, v: [B, kv, S, d].
        masks: one a block of `BLOCK` rows: 0 or -inf for its last keys, [B or 1, 1, rows, 1, keys], q's dtype.
        window: sliding window in tokens; only decides which keys a block reads, the masks do the rest.

    Returns:
        [B, kv, S, g, d], q's dtype.
    """
    result: Tensor = _Blocked.apply(q, k, v, window, *masks)
    return result


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None,
    first: Tensor | None,
    window: int | None,
) -> Tensor:
    """Causal attention by PyTorch's kernels: variable-length flash in half precision, SDPA otherwise.

    Args:
        q: [B, S, heads, d]; k, v: [B, S, kv, d].
        cu_seqlens: [D + 1] int32 borders of segments that do not see each other; needed by the flash kernel.
        first: [B, S] first token each token sees; None: plain causal.
        window: sliding window in tokens.

    Returns:
        [B, S, heads, d].
    """
    if cu_seqlens is not None and _flash_takes(q):
        from torch.nn.attention.varlen import varlen_attn

        left = -1 if window is None else window - 1
        longest = q.shape[1]  # a bound, the same for every batch, so that compiled code serves them all
        group = q.shape[2] // k.shape[2]
        folded = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        out = varlen_attn(
            *folded, cu_seqlens, cu_seqlens, longest, longest, window_size=(left, 0), enable_gqa=group > 1
        )
        return cast(Tensor, out).view(q.shape)
    mask = None if first is None else _visible(first)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _flash_takes(q: Tensor) -> bool:
    """Whether the flash kernel is made for q [..., head_dim]: half precision, Ampere or newer, even heads."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _visible(first: Tensor) -> Tensor:
    """[B, 1, S, S] bool: key no later than the query and no earlier than the first token it sees."""
    index = torch.arange(first.shape[1], device=first.device)
    return ((index <= index[:, None]) & (index >= first[..., None]))[:, None]
