"""The attention product itself: causal blocks for CPUs, PyTorch's fused kernels elsewhere.

On a CPU, SDPA's flash kernel spends as long on a causal mask as on none at short sequences; here each block
of query rows meets only the keys up to its end, and the query heads that share a KV head are folded into
the rows of one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # query rows a block


class Span(NamedTuple):
    """One block: query rows [row, stop) and the keys [begin, end) that they meet."""

    row: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True)
class Blocks:
    """The product of some queries with some keys, cut up."""

    spans: tuple[Span, ...]
    """Every query row that sees a key is in one."""
    masks: tuple[Tensor | None, ...]
    """For each, 0 or -inf added to the scores of its last keys [batch or 1, 1, rows, 1, keys]; None: all is seen."""


NO_BLOCKS = Blocks((), ())
"""Where other kernels do the work."""


def causal_blocks(
    queries: Tensor, keys: Tensor, first: Tensor | None, window: int | None, dtype: torch.dtype, *,
    chunk: int, trim: bool, most_keys: int | None = None,
) -> Blocks:  # fmt: skip
    """Cut up a causal product.

    Args:
        queries, keys: [rows], [keys] int64, places in the sequence, ascending.
        first: [batch or 1, rows] place of the first token each query sees; None: plain causal.
        window: sliding window in tokens.
        dtype: of the masks.
        chunk: no block crosses a multiple of so many rows.
        trim: leave out, at the price of looking, keys that no row of a block sees; else the blocks are the same
            whatever the documents are.
        most_keys: keys of a block; None: all that it sees.
    """
    spans: list[Span] = []
    masks: list[Tensor | None] = []
    for start in range(0, len(queries), chunk):
        for row in range(start, min(start + chunk, len(queries)), BLOCK):
            stop = min(row + BLOCK, start + chunk, len(queries))
            begin, end = _keys_of(row, stop, queries, keys, first if trim else None, window)
            step = most_keys or max(1, end - begin)
            for key in range(begin, end, step):
                span = Span(row, stop, key, min(key + step, end))
                spans.append(span)
                masks.append(_mask(span, queries, keys, first, dtype, trim))
    return Blocks(tuple(spans), tuple(masks))


def _keys_of(
    row: int, stop: int, queries: Tensor, keys: Tensor, first: Tensor | None, window: int | None
) -> tuple[int, int]:
    """Keys [begin, end) that some row of a block may see; both places ascend, so that they are one range."""
    end = int(torch.searchsorted(keys, queries[stop - 1], right=True))
    if first is not None:
        return int(torch.searchsorted(keys, first[:, row:stop].amin())), end
    return (0 if window is None else int(torch.searchsorted(keys, queries[row] - window + 1))), end


def _mask(
    span: Span, queries: Tensor, keys: Tensor, first: Tensor | None, dtype: torch.dtype, trim: bool
) -> Tensor | None:
    """The additive mask of a block; without documents it covers the diagonal's triangle alone."""
    row, stop, begin, end = span
    if first is None:
        begin = max(begin, int(torch.searchsorted(keys, queries[row])))
    query, key = queries[row:stop, None], keys[begin:end]
    hidden = (key > query)[None]
    if first is not None:
        hidden = hidden | (key < first[:, row:stop, None])
    if begin >= end or (trim and not hidden.any()):
        return None
    zero = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
    return zero.masked_fill_(hidden, float("-inf"))[:, None, :, None, :]


def masked_scores(q: Tensor, k: Tensor, mask: Tensor | None, batch: int, group: int) -> Tensor:
    """q k^T + mask: q [B*kv, rows*g, d], k [B*kv, keys, d] -> [B*kv, rows*g, keys]; see `Blocks` for the mask."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        masked = scores.view(batch, -1, q.shape[1] // group, group, k.shape[1])
        if mask.shape[-1] < masked.shape[-1]:
            masked = masked[..., -mask.shape[-1] :]
        masked.add_(mask)
    return scores


class _Blocked(torch.autograd.Function):
    """Each block's probabilities are made again in backward: kept, they were a third of a step's tensors at 512 tokens,
    and all but nothing faster."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: tuple[Span, ...], *masks: Tensor | None
    ) -> Tensor:  # fmt: skip
        """See `blocked_attention`."""
        batch, _, rows, group, dim = q.shape
        keys = k.shape[2]
        qf, kf, vf = q.reshape(-1, rows * group, dim), k.reshape(-1, keys, dim), v.reshape(-1, keys, dim)
        out = torch.empty_like(qf)
        for mask, (row, stop, begin, end) in zip(masks, spans, strict=True):
            mine = slice(row * group, stop * group)
            p = torch.softmax(masked_scores(qf[:, mine], kf[:, begin:end], mask, batch, group), -1)
            out[:, mine] = torch.bmm(p, vf[:, begin:end])
        ctx.save_for_backward(qf, kf, vf, *masks)
        ctx.geometry = (q.shape, k.shape, spans)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; those of k and v add up over the blocks in fp32 at least."""
        qf, kf, vf, *masks = ctx.saved_tensors
        shape, full, spans = ctx.geometry
        batch, group = shape[0], shape[3]
        gf = grad.reshape(qf.shape)
        dq = torch.empty_like(qf)
        wide = torch.promote_types(qf.dtype, torch.float32)  # several blocks add into one key
        dk, dv = (torch.zeros_like(kf, dtype=wide) for _ in range(2))
        for mask, (row, stop, begin, end) in zip(masks, spans, strict=True):
            mine, keys = slice(row * group, stop * group), slice(begin, end)
            p = torch.softmax(masked_scores(qf[:, mine], kf[:, keys], mask, batch, group), -1)
            dp = torch.bmm(gf[:, mine], vf[:, keys].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, mine] = torch.bmm(ds, kf[:, keys])
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), qf[:, mine])
            dv[:, keys] += torch.bmm(p.transpose(1, 2), gf[:, mine])
        return (
            dq.view(shape), dk.to(kf.dtype).view(full), dv.to(vf.dtype).view(full), None, *[None] * len(masks),
        )  # fmt: skip


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
    """Causal attention by blocks of query rows.

    Args:
        q: [B, kv, rows, g, d], already scaled and rotated.
        k, v: [B, kv, keys, d]; the keys may be more than the rows.
        blocks: cover every row.

    Returns:
        [B, kv, rows, g, d], q's dtype.
    """
    result: Tensor = _Blocked.apply(q, k, v, blocks.spans, *blocks.masks)
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
    if cu_seqlens is not None and flash_takes(q.device, q.dtype, q.shape[-1]):
        longest = q.shape[1]  # a bound, the same for every batch, so that compiled code serves them all
        folded = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return causal_segments(*folded, (cu_seqlens, cu_seqlens), (longest, longest), window).view(q.shape)
    mask = None if first is None else _visible(first)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def causal_segments(
    q: Tensor, k: Tensor, v: Tensor, borders: tuple[Tensor, Tensor], longest: tuple[int, int], window: int | None
) -> Tensor:
    """Variable-length flash attention within segments; the last query of each stands at its last key.

    Args:
        q: [rows, heads, d]; k, v: [keys, kv, d].
        borders: [D + 1] int32 each, of the queries' and of the keys' segments.
        longest: bounds of their lengths.
        window: sliding window in tokens.

    Returns:
        [rows, heads, d].
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, *borders, *longest, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1])
    return cast(Tensor, out)


def flash_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernel is made for it: half precision, Ampere or newer, even heads."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


def _visible(first: Tensor) -> Tensor:
    """[B, 1, S, S] bool: key no later than the query and no earlier than the first token it sees."""
    index = torch.arange(first.shape[1], device=first.device)
    return ((index <= index[:, None]) & (index >= first[..., None]))[:, None]
