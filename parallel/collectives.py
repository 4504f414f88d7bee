"""Collectives that autograd knows, as nodes of their own, so that compiled graphs may hold them.

                     before                 moves                          after
gather_tokens        x [T/n, h] each        all-gather                     [T, h] on all; backward: reduce-scatter
scatter_sum          x [T, h] partial sums  reduce-scatter                 [T/n, h] each; backward: all-gather
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from parallel.mesh import Axis


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """x [T/n, ...], this rank's tokens -> [T, ...], everyone's in order."""
    if axis.group is None:
        return x
    result: Tensor = funcol.wait_tensor(funcol.all_gather_single_autograd(x.contiguous(), 0, axis.group))
    return result


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """x [T, ...], one addend of n -> [T/n, ...], the sums for this rank's tokens."""
    if axis.group is None:
        return x
    result: Tensor = funcol.wait_tensor(funcol.reduce_scatter_single_autograd(x.contiguous(), "sum", 0, axis.group))
    return result


def gather_plain(x: Tensor, axis: Axis) -> Tensor:
    """x [...] -> [n, ...] of every rank along the axis, without a gradient."""
    if axis.group is None:
        return x[None]
    result: Tensor = funcol.wait_tensor(funcol.all_gather_single(x.contiguous()[None], 0, axis.group))
    return result


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
