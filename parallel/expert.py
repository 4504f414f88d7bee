"""Tokens to the ranks of their experts and back (Lepikhin et al., 2021), each token once for each of its experts.

pairs       (token, expert), sorted by expert: those of one rank stand together
exchange    how many of each expert, then the rows themselves, straight from rank to rank
rows        sorted by local expert, then by the rank they came from, then by token
collect     the same way back; a token's results are added up in the order of its choices
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.exchange import Works, start_rows, wait_all
from parallel.mesh import Axis


@dataclass(frozen=True)
class Pairs:
    """The pairs of this rank's tokens and their experts, sorted by expert, stably."""

    token: Tensor
    """[P] token of each pair."""
    place: Tensor
    """[T, k] place of each pair in the sorted order; P where it was dropped."""
    order: Tensor
    """[P] index of each pair among the T * k."""
    counts: Tensor
    """[E] int64 pairs of each expert."""


def sort_pairs(experts: Tensor, kept: Tensor | None, count: int) -> Pairs:
    """Sort the pairs of experts [T, k] int64; those that are not `kept` [T, k] are left out."""
    flat = experts.flatten()
    if kept is not None:  # behind all others
        flat = flat.where(kept.flatten(), count)
    order = flat.argsort(stable=True)
    counts = histogram(flat, count + 1)[:count]
    if kept is not None:
        order = order[: int(counts.sum())]
    place = torch.full_like(flat, len(order))
    place[order] = torch.arange(len(order), device=flat.device)
    return Pairs(order // experts.shape[1], place.view_as(experts), order, counts)


def histogram(values: Tensor, count: int) -> Tensor:
    """How often each of 0 .. count - 1 occurs, [count] int64; bincount on CUDA would wait for the device."""
    ones = torch.ones_like(values)
    return torch.zeros(count, dtype=torch.int64, device=values.device).scatter_add_(0, values, ones)


class _Spread(torch.autograd.Function):
    """Rows of tokens for their pairs; the gradients of a token's pairs are added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        """x [T, h] -> [P, h]."""
        ctx.pairs = pairs
        return x.index_select(0, pairs.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[P, h] -> [T, h]."""
        return _added_up(grad, ctx.pairs), None


class _Collect(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs) -> Tensor:
        """rows [P, h] -> [T, h]."""
        ctx.pairs = pairs
        return _added_up(rows, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[T, h] -> [P, h]."""
        return grad.index_select(0, ctx.pairs.token), None


def _added_up(rows: Tensor, pairs: Pairs) -> Tensor:
    """Sum of each token's rows: [P, h] -> [T, h]."""
    if len(pairs.token) < pairs.place.numel():  # a row of zeros stands for the dropped
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return F.embedding_bag(pairs.place, rows, mode="sum")


class _Exchange(torch.autograd.Function):
    """Rows to other ranks; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], axis: Axis, pending: Works) -> Tensor:
        """x [sum of send, ...] -> [sum of receive, ...], filled once the pending work is done."""
        ctx.counts, ctx.axis = (send, receive), axis
        out, works = start_rows(x.contiguous(), send, receive, axis)
        pending += works
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient of x."""
        send, receive = ctx.counts
        out, works = start_rows(grad.contiguous(), receive, send, ctx.axis)
        wait_all(works)
        return out, None, None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """x [M, ...] -> x[order]."""
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Back into the old order."""
        return grad.index_select(0, ctx.inverse), None, None


@dataclass(frozen=True)
class Dispatched:
    """Rows on their way to the experts of this rank."""

    rows: Tensor
    """[M, h], by source rank, then by local expert; filled once `arrived` was called."""
    weights: Tensor
    """[M] of each pair."""
    pairs: Pairs
    """Of this rank's own tokens."""
    axis: Axis
    """The ranks that share the experts."""
    send: list[int]
    """Rows for each rank."""
    receive: list[int]
    """Rows from each rank."""
    counts: Tensor
    """[ranks, local experts] int64: rows from each rank for each local expert."""
    pending: Works
    """What is still on its way."""

    def arrived(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait; rows [M, h] and weights [M] sorted by local expert, and how many each has [local experts]."""
        wait_all(self.pending)
        if self.axis.group is None:
            return self.rows, self.weights, self.counts[0]
        order, inverse = self.orders
        rows, weights = (_Reorder.apply(each, order, inverse) for each in (self.rows, self.weights))
        return rows, weights, self.counts.sum(0)

    def collect(self, rows: Tensor) -> Tensor:
        """Results [M, h] of the experts, as `arrived` sorted them, back to their tokens and added up: [T, h]."""
        if self.axis.group is not None:
            order, inverse = self.orders
            rows = _Reorder.apply(rows, inverse, order)
            pending: Works = []
            rows = _Exchange.apply(rows, self.receive, self.send, self.axis, pending)
            wait_all(pending)
        result: Tensor = _Collect.apply(rows, self.pairs)
        return result

    @cached_property
    def orders(self) -> tuple[Tensor, Tensor]:
        """From (rank, expert) to (expert, rank) and back: places of rows, [M] each; made without waiting."""
        lengths = self.counts.flatten()
        starts = (lengths.cumsum(0) - lengths).view_as(self.counts).t().flatten()
        sorted_lengths = self.counts.t().flatten()
        shift = starts - (sorted_lengths.cumsum(0) - sorted_lengths)
        rows = torch.arange(len(self.rows), device=self.rows.device)
        order = rows + shift.repeat_interleave(sorted_lengths, output_size=len(rows))
        return order, torch.empty_like(order).index_copy_(0, order, rows)


def dispatch(x: Tensor, weights: Tensor, pairs: Pairs, axis: Axis) -> Dispatched:
    """Start to send tokens to their experts.

    Args:
        x: [T, h] tokens of this rank.
        weights: [T, k] of their experts.
        pairs: of the same tokens, sorted.
        axis: ranks that share the experts, each an equal number of neighbours.
    """
    rows, row_weights = _Spread.apply(x, pairs), weights.flatten().index_select(0, pairs.order)
    counts = pairs.counts.view(axis.size, -1)
    if axis.group is None:
        return Dispatched(rows, row_weights, pairs, axis, [], [], counts, [])
    theirs = torch.empty_like(counts)
    own, experts = counts.contiguous(), counts.shape[1]
    works = start_rows(own.view(-1), [experts] * axis.size, [experts] * axis.size, axis, out=theirs.view(-1))[1]
    wait_all(works)
    send, receive = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()  # the one wait for the device
    pending: Works = []
    rows = _Exchange.apply(rows, send, receive, axis, pending)
    row_weights = _Exchange.apply(row_weights, send, receive, axis, pending)
    return Dispatched(rows, row_weights, pairs, axis, send, receive, theirs, pending)
