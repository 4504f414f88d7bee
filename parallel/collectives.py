"""Collectives that autograd knows, as nodes of their own, so that a schedule may split the backward pass around them.

                     before                 moves                          after
gather_tokens        x [T/n, h] each        all-gather                     [T, h] on all; backward: reduce-scatter
scatter_sum          x [T, h] partial sums  reduce-scatter                 [T/n, h] each; backward: all-gather

Compiled graphs hold PyTorch's functional collectives. Elsewhere the plain ones are called: under gloo a functional
reduce-scatter has ended a run of four ranks with a segmentation fault.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from parallel.exchange import gather_into, reduce_into
from parallel.mesh import Axis


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """x [T/n, ...], this rank's tokens -> [T, ...], everyone's in order."""
    if axis.group is None:
        return x
    if torch.compiler.is_compiling():
        compiled: Tensor = funcol.wait_tensor(funcol.all_gather_single_autograd(x.contiguous(), 0, axis.group))
        return compiled
    result: Tensor = _Gather.apply(x, axis)
    return result


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """x [T, ...], one addend of n -> [T/n, ...], the sums for this rank's tokens."""
    if axis.group is None:
        return x
    if torch.compiler.is_compiling():
        compiled: Tensor = funcol.wait_tensor(
            funcol.reduce_scatter_single_autograd(x.contiguous(), "sum", 0, axis.group)
        )
        return compiled
    result: Tensor = _Scatter.apply(x, axis)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.axis), None


def _all_gather(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty(len(x) * axis.size, *x.shape[1:])
    if x.device.type == "cpu" and axis.group is not None:
        gather_into(out, x.contiguous(), axis.group)
    else:
        dist.all_gather_single(out, x.contiguous(), group=axis.group)
    return out


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty(len(x) // axis.size, *x.shape[1:])
    if x.device.type == "cpu" and axis.group is not None:
        reduce_into(out, x.contiguous(), axis.group)
    else:
        dist.reduce_scatter_single(out, x.contiguous(), group=axis.group)
    return out


def gather_plain(x: Tensor, axis: Axis) -> Tensor:
    """x [...] -> [n, ...] of every rank along the axis, without a gradient."""
    if axis.group is None:
        return x[None]
    if torch.compiler.is_compiling():
        compiled: Tensor = funcol.wait_tensor(funcol.all_gather_single(x.contiguous()[None], 0, axis.group))
        return compiled
    return _all_gather(x[None], axis)


def add_up(tensors: list[Tensor], axis: Axis) -> None:
    """Replace each tensor by its sum over the axis, all in one message of their common dtype."""
    if axis.group is None or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=axis.group)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def exchange_sum(tensor: Tensor, other: int, axis: Axis) -> None:
    """Replace a tensor by its sum with the same tensor of one other rank of the axis, bitwise the same on both."""
    theirs = torch.empty_like(tensor)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor.contiguous(), group=axis.group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=other),
        ]
    )
    for each in work:
        each.wait()
    tensor += theirs
