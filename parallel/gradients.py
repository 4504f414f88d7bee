"""What is left to add up when the backward passes are done, beside data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel.collectives import add_up, exchange_sum
from parallel.mesh import Mesh
from parallel.shards import Shard


def finish_gradients(shards: Sequence[Shard], mesh: Mesh, table: str | None = None) -> None:
    """Bring every gradient to that of the whole step.

    Weights that all tensor-parallel ranks hold (norms) saw the tokens of one rank each: their gradients are
    summed over tp. A `table` that the first and the last pipeline stage hold was used by each in its way:
    its two gradients are summed.
    """
    add_up([each.gradient for each in shards if each.partial and each.gradient is not None], mesh.axis("tp"))
    held = [each.gradient for each in shards if each.name == table and each.gradient is not None]
    _share(held, mesh)


def _share(held: list[Tensor], mesh: Mesh) -> None:
    """Sum the table's gradients: both are here (the stages run back to this rank), or one is on another rank."""
    if len(held) == 2:
        total = held[0] + held[1]
        for gradient in held:
            gradient.copy_(total)
    elif held:
        pp = mesh.axis("pp")
        exchange_sum(held[0], pp.size - 1 if pp.rank == 0 else 0, pp)
