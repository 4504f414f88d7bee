"""Attention whose keys and values are spread over the context-parallel ranks and passed around (Liu et al., 2023).

step             rank 0     rank 1     rank 2     rank 3        chunks of a sequence, zigzag (parallel/context.py)
has queries of   0, 7       1, 6       2, 5       3, 4
0, keys of       0, 7       1, 6       2, 5       3, 4          the diagonal: low x low, high x low, high x high
1                3, 4       0, 7       1, 6       2, 5          rank 0: high x both; others: both x low
2, 3             ...                                            the same work for every rank at every step

Each step's keys and values are used while the next ones arrive. Its output is merged into the sum so far by
log-sum-exp. Backward passes them around again, and with each the sums of its gradients, which end at its owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from model.attention_kernels import Blocks, masked_scores
from parallel.context import chunk_length, circulate, own_chunks, pass_on
from parallel.exchange import wait_all
from parallel.mesh import Axis

MOST_KEYS = 512
"""Of a block, so that its scores stay in the cache through the passes over them."""


class Saved(NamedTuple):
    """What backward knows of all keys together."""

    q: Tensor
    """Queries."""
    out: Tensor
    """Merged output, shaped like q."""
    lse: Tensor
    """Merged log-sum-exp of each query's scores."""
    grad: Tensor
    """Gradient of `out`."""


class Products(Protocol):
    """How this rank's queries meet the keys and values kv [2, ...] that it has at one step; all in one layout."""

    def lse_like(self, q: Tensor) -> Tensor:
        """Memory for the log-sum-exps, fp32 at least."""

    def attend(self, step: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge what q sees of kv into out and lse, fp32 at least."""

    def differentiate(self, step: int, saved: Saved, kv: Tensor, dq: Tensor, dkv: Tensor) -> None:
        """Add to the gradients of q and kv, fp32 at least."""


def ring_attention(q: Tensor, kv: Tensor, products: Products, axis: Axis) -> Tensor:
    """What this rank's q sees of the keys and values kv [2, ...] of all ranks; shaped like q, in its dtype."""
    result: Tensor = _Ring.apply(q, kv, products, axis)
    return result


class _Ring(torch.autograd.Function):
    """Keeps what is this rank's own: q, kv, out and the log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, products: Products, axis: Axis) -> Tensor:
        """See `ring_attention`."""
        q, kv = q.contiguous(), kv.contiguous()
        total, lse = torch.zeros_like(q, dtype=_wide(q)), products.lse_like(q).fill_(float("-inf"))
        for step, current in enumerate(circulate(kv, axis)):
            products.attend(step, q, current, total, lse)
        out = total.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.products, ctx.axis = products, axis
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of q and kv.

        At step s > 0 rank r has the keys of r - s: it adds its part to their gradient's sum and passes it on to r + 1,
        which has them at s + 1; after the last step each sum is sent to its owner, who adds its own part.
        """
        q, kv, out, lse = ctx.saved_tensors
        saved = Saved(q, out, lse, grad.contiguous())
        dq = torch.zeros_like(q, dtype=_wide(q))
        own, summed, *parts = (torch.zeros_like(kv, dtype=_wide(q)) for _ in range(min(4, ctx.axis.size + 1)))
        work: list[dist.Work] = []
        for step, current in enumerate(circulate(kv, ctx.axis)):
            part = parts[step % len(parts)].zero_() if step else own  # the other one may still be on its way
            ctx.products.differentiate(step, saved, current, dq, part)
            if step:
                wait_all(work)
                part += summed
                work = pass_on(part, summed, ctx.axis, tag=1)
        wait_all(work)
        return dq.to(q.dtype), own.add_(summed).to(kv.dtype), None, None


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Replace out [..., d], lse [...] by those over two disjoint sets of keys; lse -inf: none seen, out ignored."""
    total = torch.logaddexp(lse, part_lse)
    base = total.masked_fill(total == float("-inf"), 0)  # -inf less -inf is no number
    out.mul_((lse - base).exp()[..., None]).add_(part * (part_lse - base).exp()[..., None])
    lse.copy_(total)


@dataclass(frozen=True)
class BlockProducts:
    """On any device, by products of blocks: q [B*kv, rows*g, d] scaled already, kv [2, B*kv, rows, d]."""

    steps: tuple[Blocks, ...]
    """With the keys of this rank, of rank - 1 ..."""
    batch: int
    """Sequences."""
    group: int
    """Query heads a KV head."""

    def lse_like(self, q: Tensor) -> Tensor:
        """[B*kv, rows*g]."""
        return q.new_empty(q.shape[:-1], dtype=_wide(q))

    def attend(self, step: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge what q sees of kv."""
        blocks = self.steps[step]
        for mask, (row, stop, begin, end) in zip(blocks.masks, blocks.spans, strict=True):
            rows, keys = slice(row * self.group, stop * self.group), slice(begin, end)
            scores = masked_scores(q[:, rows], kv[0, :, keys], mask, self.batch, self.group)
            merge(out[:, rows], lse[:, rows], *_softmax_times(scores, kv[1, :, keys]))

    def differentiate(self, step: int, saved: Saved, kv: Tensor, dq: Tensor, dkv: Tensor) -> None:
        """Probabilities are made again, over all keys at once by the merged log-sum-exp."""
        blocks = self.steps[step]
        for mask, (row, stop, begin, end) in zip(blocks.masks, blocks.spans, strict=True):
            rows, keys = slice(row * self.group, stop * self.group), slice(begin, end)
            q, out, grad, (k, v) = saved.q[:, rows], saved.out[:, rows], saved.grad[:, rows], kv[:, :, keys]
            scores = masked_scores(q, k, mask, self.batch, self.group)
            p = scores.to(dq.dtype).sub_(saved.lse[:, rows, None]).exp_()
            # Operands are made wide one by one: an operation on two dtypes takes ten times as long on a CPU.
            delta = (grad.to(dq.dtype) * out.to(dq.dtype)).sum(-1, keepdim=True)
            ds = torch.bmm(grad, v.transpose(1, 2)).to(dq.dtype).sub_(delta).mul_(p).to(q.dtype)
            dq[:, rows] += torch.bmm(ds, k).to(dq.dtype)
            dkv[0, :, keys] += torch.bmm(ds.transpose(1, 2), q).to(dq.dtype)
            dkv[1, :, keys] += torch.bmm(p.to(q.dtype).transpose(1, 2), grad).to(dq.dtype)


def _softmax_times(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """scores [N, rows, keys], overwritten -> softmax times v, log-sum-exp [N, rows]: 0, -inf for a row all hidden."""
    wide = scores.to(_wide(scores))
    top = wide.amax(-1, keepdim=True)
    top = top.masked_fill_(top == float("-inf"), 0)
    p = wide.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    part = torch.bmm(p.to(v.dtype), v).to(p.dtype) / total.masked_fill(total == 0, 1)
    return part, (top + total.log()).squeeze(-1)


class Pair(NamedTuple):
    """A call of the flash kernel: one of this rank's two chunks of queries with one of the two chunks of keys."""

    query: int
    """0 or 1."""
    key: int
    """0 or 1."""
    borders: tuple[Tensor, Tensor]
    """[segments + 1] int32 of the queries and of the keys: a query meets the keys of its segment."""
    seen: Tensor | None
    """[rows] bool: which queries count; None: all."""
    window: tuple[int, int]
    """Keys before and after that a query sees, counted with the last query of a segment at its last key; -1: all."""


@dataclass(frozen=True)
class FlashProducts:
    """On CUDA in half precision, by the flash kernel: q [2, B*c, heads, d], kv [2, 2, B*c, kv, d], c tokens a chunk.

    This has not been run on hardware: its calls are checked against the operators' schemas, and its segments
    against a model of the kernel.
    """

    steps: tuple[tuple[Pair, ...], ...]
    """With the keys of this rank, of rank - 1 ..."""
    chunk: int
    """Tokens of a chunk."""

    def lse_like(self, q: Tensor) -> Tensor:
        """[2, heads, B*c], as the kernel has them."""
        return q.new_empty(2, q.shape[2], q.shape[1], dtype=_wide(q))

    def attend(self, step: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge what q sees of kv."""
        for pair in self.steps[step]:
            part, part_lse = flash_forward(q[pair.query], kv[0, pair.key], kv[1, pair.key], pair, self.chunk)
            hidden = part_lse == float("inf")  # the kernel's sign for a query that sees no key
            if pair.seen is not None:
                hidden = hidden | ~pair.seen
            part_lse = part_lse.masked_fill(hidden, float("-inf"))
            merge(out[pair.query], lse[pair.query].t(), part, part_lse.t())

    def differentiate(self, step: int, saved: Saved, kv: Tensor, dq: Tensor, dkv: Tensor) -> None:
        """The kernel makes probabilities from the log-sum-exps that it is given: the merged ones, or inf for none."""
        for pair in self.steps[step]:
            at = pair.query
            lse = saved.lse[at] if pair.seen is None else saved.lse[at].masked_fill(~pair.seen, float("inf"))
            own = Saved(saved.q[at], saved.out[at], lse, saved.grad[at])
            parts = flash_backward(own, kv[0, pair.key], kv[1, pair.key], pair, self.chunk)
            dq[at] += parts[0]
            dkv[0, pair.key] += parts[1]
            dkv[1, pair.key] += parts[2]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, pair: Pair, longest: int) -> tuple[Tensor, Tensor]:
    """q [rows, heads, d], k and v [keys, kv, d] -> output like q, log-sum-exp [heads, rows] fp32."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *pair.borders, longest, longest, 0.0, pair.window == (-1, 0), False,
        window_size_left=pair.window[0], window_size_right=pair.window[1],
    )  # fmt: skip
    return out, lse


def flash_backward(own: Saved, k: Tensor, v: Tensor, pair: Pair, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the lse of `own` is [heads, rows] fp32."""
    # Without dropout no random numbers are drawn: their state is a form.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=k.device), torch.empty(0, device=k.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        own.grad, own.q, k, v, own.out, own.lse, *pair.borders, longest, longest, 0.0, pair.window == (-1, 0),
        state, unused, window_size_left=pair.window[0], window_size_right=pair.window[1],
    )  # fmt: skip
    return dq, dk, dv


def diagonal_borders(cu_seqlens: Tensor, seq_len: int, begin: int, length: int) -> Tensor:
    """cu_seqlens [D + 1] of whole sequences, as borders within the chunks [begin, begin + length) of all of them."""
    within = (cu_seqlens % seq_len - begin).clamp(0, length)
    return (cu_seqlens // seq_len * length + within).to(torch.int32)


def flash_steps(
    positions: Tensor, cu_seqlens: Tensor, seq_len: int, window: int | None, axis: Axis
) -> tuple[tuple[Pair, ...], ...]:
    """The kernel's calls, by step.

    Args:
        positions: [B, seq_len / cp] of this rank, restarting with each document.
        cu_seqlens: [D + 1] int32, borders of all documents in the whole sequences.
        seq_len: tokens of a whole sequence.
        window: sliding window in tokens.
        axis: the context-parallel ranks.
    """
    length, mine = chunk_length(seq_len, axis), own_chunks(axis)
    steps = []
    for step in range(axis.size):
        theirs = own_chunks(Axis(axis.size, (axis.rank - step) % axis.size))
        pairs = []
        for query, upper in enumerate(mine):
            own = positions.unflatten(1, (2, length))[:, query]
            for key, lower in enumerate(theirs):
                if lower == upper:
                    borders = diagonal_borders(cu_seqlens, seq_len, upper * length, length)
                    pairs.append(Pair(query, key, (borders, borders), None, (-1 if window is None else window - 1, 0)))
                elif lower < upper and (window is None or (upper - lower - 1) * length < window - 1):
                    pairs.append(_across(own, upper * length, lower * length, window)._replace(query=query, key=key))
        steps.append(tuple(pairs))
    return tuple(steps)


def _across(own: Tensor, upper: int, lower: int, window: int | None) -> Pair:
    """A chunk of queries with an earlier chunk of keys, in each sequence: one document at most reaches into both.

    keys      |  y  |  that document's  |        three segments a sequence, of which the middle one has both
    queries   |     |  that document's  | rest |

    own [B, c]: the queries' positions; upper, lower: places of the chunks' first tokens.
    """
    batch, length = own.shape
    index = torch.arange(length, device=own.device)
    skipped = (upper - own[:, :1] - lower).clamp(0, length)  # y: keys before the document of the first query
    inside = ((own - index == own[:, :1]) & (skipped < length)).sum(1, keepdim=True)
    reach, left = inside, -1
    if window is not None:
        # The kernel aligns the ends of a segment, so its rows are the same in all sequences; `seen` does the rest.
        reach = torch.full_like(inside, min(length, window - 1 + length - (upper - lower)))
        left = max(0, window - 1 - (upper - lower))
    begin = torch.arange(batch, device=own.device)[:, None] * length
    end = torch.full((1,), batch * length, device=own.device)
    queries = torch.cat([torch.cat([begin, begin, begin + reach], 1).flatten(), end])
    keys = torch.cat([torch.cat([begin, begin + skipped, begin + length], 1).flatten(), end])
    borders = queries.to(torch.int32), keys.to(torch.int32)
    return Pair(0, 0, borders, (index < inside).flatten(), (left, -1))
