"""Who holds which tokens of a sequence under context parallelism, and how keys and values get around.

A sequence of seq_len tokens is cut into 2 cp chunks; each rank has one from either end, so that under a causal mask
all have the same work (zigzag; Brandon et al., 2023):

chunk            0   1   2   3   4   5   6   7
cp = 4, rank     0   1   2   3   3   2   1   0

gather_sequence  each rank's chunks -> whole sequences on all, in order      backward: the sum for its own chunks
circulate        rank r's tensor -> r + 1 -> r + 2 ...; the next one arrives while the last one is used
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import gather_tokens
from parallel.exchange import wait_all
from parallel.mesh import Axis


def chunk_length(seq_len: int, axis: Axis) -> int:
    """Tokens of one of a sequence's 2 cp chunks.

    Raises:
        ValueError: the sequence does not divide.
    """
    if seq_len % (2 * axis.size):
        raise ValueError(f"a sequence of {seq_len} tokens cannot be cut into 2 x {axis.size} equal chunks")
    return seq_len // (2 * axis.size)


def own_chunks(axis: Axis) -> tuple[int, int]:
    """Numbers of this rank's two chunks, lower first."""
    return axis.rank, 2 * axis.size - 1 - axis.rank


def local_places(seq_len: int, axis: Axis, device: torch.device | None = None) -> Tensor:
    """[seq_len / cp] int64, ascending: index in its sequence of each token that this rank has of it."""
    return local_share(torch.arange(seq_len, device=device), seq_len, axis)


def local_share(t: Tensor, seq_len: int, axis: Axis) -> Tensor:
    """t [T, ...] of whole sequences one after the other -> [T / cp, ...]: of each this rank's two chunks."""
    if axis.size == 1:
        return t
    chunks = t.reshape(-1, 2 * axis.size, chunk_length(seq_len, axis), *t.shape[1:])
    own = [chunks[:, number] for number in own_chunks(axis)]  # a list of numbers as index would wait for a GPU
    return torch.stack(own, 1).flatten(0, 2)


def in_order(parts: Tensor, dim: int) -> Tensor:
    """parts [cp, ...], each rank's with its two chunks along `dim` -> [...] with the whole sequence along it."""
    low, high = parts.unflatten(dim + 1, (2, -1)).unbind(dim + 1)
    return torch.cat([*low.unbind(0), *reversed(high.unbind(0))], dim)


def gather_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """x with this rank's tokens of each sequence along `dim` -> with all of them, in order; differentiable."""
    return in_order(gather_tokens(x[None], axis), dim)


def pass_on(send: Tensor, receive: Tensor, axis: Axis, tag: int = 0) -> list[dist.Work]:
    """Begin sending to the next rank of the axis and receiving from the one before; both contiguous.

    Messages of one kind carry one tag: gloo matches by it, NCCL by the order.
    """
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, send, group=axis.group, group_peer=after, tag=tag),
            dist.P2POp(dist.irecv, receive, group=axis.group, group_peer=before, tag=tag),
        ]
    )


def circulate(own: Tensor, axis: Axis) -> Iterator[Tensor]:
    """This rank's tensor, then those of rank - 1, rank - 2 ... in turn, each while the next is on its way.

    A tensor is valid until the next is asked for. Besides `own`, two at most are held.
    """
    spare = [torch.empty_like(own) for _ in range(min(2, axis.size - 1))]
    current = own
    for step in range(axis.size - 1):
        coming = spare[step % 2]
        work = pass_on(current, coming, axis)
        yield current
        wait_all(work)
        current = coming
    yield current


def unmasked_pairs(positions: Tensor, seq_len: int, cp: int, window: int | None = None) -> list[int]:
    """Pairs of a query and a key that it sees, for each of cp ranks: their work in attention.

    Args:
        positions: [T] int64 of whole sequences, restarting with each document.
        seq_len: tokens of a whole sequence.
        cp: ranks that share each.
        window: sliding window in tokens.
    """
    back = positions if window is None else positions.clamp(max=window - 1)
    chunks = (back + 1).view(-1, 2 * cp, seq_len // (2 * cp)).sum((0, 2))
    pairs: list[int] = (chunks[:cp] + chunks[cp:].flip(0)).tolist()
    return pairs
