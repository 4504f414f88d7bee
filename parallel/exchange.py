"""All-gather and reduce-scatter between CPUs, sent straight from rank to rank; FSDP uses them too.

gloo's own all-gather and reduce-scatter take two to three times as long as each rank's sending the others their
part (a reduce-scatter is an all-reduce there, of which all but a part is thrown away).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from parallel.mesh import Axis

Works = list[dist.Work | None]
"""Messages on their way."""


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Wait until all have arrived."""
    for each in works:
        if each is not None:
            each.wait()


def _start(send: Sequence[Tensor], receive: Sequence[Tensor], group: dist.ProcessGroup) -> Works:
    """Begin to send each other rank its tensor, and to receive one of each; both lists go by rank.

    Empty ones are not sent: both sides know of them.
    """
    rank, size = dist.get_rank(group), group.size()
    works: Works = []
    for step in range(1, size):  # each rank begins with another one
        to, source = (rank + step) % size, (rank - step) % size
        if receive[source].numel():
            works.append(dist.irecv(receive[source], group=group, group_src=source))
        if send[to].numel():
            works.append(dist.isend(send[to], group=group, group_dst=to))
    return works


def _swap(send: Sequence[Tensor], receive: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send each other rank its tensor, and receive one of each."""
    wait_all(_start(send, receive, group))


def start_rows(
    x: Tensor, send: list[int], receive: list[int], axis: Axis, out: Tensor | None = None
) -> tuple[Tensor, Works]:
    """Begin to send some rows to each rank, those of the first rank first.

    Args:
        x: [sum of send, ...], contiguous, to be left alone until the work is done.
        send, receive: rows to and from each rank.
        out: [sum of receive, ...]; None: made.

    Returns:
        What arrives, in the order of ranks, and what to wait for.
    """
    out = x.new_empty(sum(receive), *x.shape[1:]) if out is None else out
    if axis.group is None:
        raise ValueError("no other ranks to exchange rows with")
    if x.device.type != "cpu":
        return out, [dist.all_to_all_single(out, x, receive, send, group=axis.group, async_op=True)]
    parts, arriving = x.split(send), out.split(receive)
    arriving[axis.rank].copy_(parts[axis.rank])
    return out, _start(parts, arriving, axis.group)


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Everyone's x [k, ...] to out [n k, ...], in the order of ranks; x may lie in its place in out already."""
    parts = list(out.view(group.size(), -1))
    own = parts[dist.get_rank(group)]
    if own.data_ptr() != x.data_ptr():
        own.copy_(x.reshape(-1))
    _swap([own] * group.size(), parts, group)


def reduce_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """The sum of everyone's addends x [n k, ...] for this rank's part, out [k, ...], in the order of ranks.

    Made in fp32 at least and rounded once, where a backend would round a bf16 sum at every addend.
    """
    rank, size = dist.get_rank(group), group.size()
    parts = list(x.view(size, -1))
    received = list(torch.empty(size, parts[0].numel(), dtype=x.dtype))
    received[rank] = parts[rank]
    _swap(parts, received, group)
    total = received[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in received[1:]:
        total += part
    out.view(-1).copy_(total)


class _Plain:
    """Memory for a message."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised."""
        return torch.empty(*size, dtype=dtype, device=device)


class DirectGather(_Plain, AllGather):
    """Everyone's shard to everyone."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input [k] -> output [n k]."""
        gather_into(output_tensor, input_tensor, group)


class DirectReduceScatter(_Plain, ReduceScatter):
    """The sum of everyone's addends for this rank's shard."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """input [n k] -> output [k]."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"only sums are made, not {op}")
        reduce_into(output_tensor, input_tensor, group)
