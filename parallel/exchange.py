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


def _swap(send: Sequence[Tensor], receive: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send each other rank its tensor, and receive one of each; both lists go by rank."""
    rank, size = dist.get_rank(group), group.size()
    work = []
    for step in range(1, size):  # each rank begins with another one
        to, source = (rank + step) % size, (rank - step) % size
        work.append(dist.irecv(receive[source], group=group, group_src=source))
        work.append(dist.isend(send[to], group=group, group_dst=to))
    for each in work:
        if each is not None:
            each.wait()


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
