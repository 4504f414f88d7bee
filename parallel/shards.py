"""Where each parameter that this rank holds lies in its global tensor. Every shard is one rectangle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.mesh import Mesh
from parallel.tensor import parameter_cuts


@dataclass(frozen=True)
class Shard:
    """One parameter as this rank holds it."""

    name: str
    """Global, layout-free name."""
    parameter: nn.Parameter
    """As its module holds it: plain, or FSDP's DTensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Global index of the first local element."""
    partial: bool
    """Whether every tensor-parallel rank holds the whole, with an addend of the gradient from its own tokens."""
    copies: int
    """Ranks that hold these elements (or ranks' stages, for a table that two stages share)."""
    writes: bool
    """Whether this rank's copy goes into a checkpoint."""

    @property
    def local(self) -> Tensor:
        """This rank's rectangle, sharing memory with the parameter."""
        return plain(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The rectangle's gradient."""
        return None if self.parameter.grad is None else plain(self.parameter.grad)


def plain(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(module: nn.Module, mesh: Mesh, twins: frozenset[str] = frozenset(), again: bool = False) -> list[Shard]:
    """The shards of a module's parameters.

    Args:
        module: one part of the model, sharded already where it will be.
        twins: names of parameters that two pipeline stages hold.
        again: whether this is the second of those stages, whose copies are not written.
    """
    cuts = parameter_cuts(module)
    return [_shard(name, p, cuts[name], mesh, name in twins, again) for name, p in module.named_parameters()]


def _shard(name: str, parameter: nn.Parameter, cut: int | None, mesh: Mesh, twin: bool, again: bool) -> Shard:
    tp, replicate = mesh.axis("tp"), mesh.axis("replicate")
    shape, start = list(parameter.shape), [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        start[0] = _first_row(shape[0], mesh)
    if cut is not None:
        start[cut] += tp.rank * shape[cut]
        shape[cut] *= tp.size
    partial = cut is None and tp.size > 1
    return Shard(
        name, parameter, tuple(shape), tuple(start), partial,
        copies=replicate.size * (tp.size if partial else 1) * (2 if twin else 1),
        writes=replicate.rank == 0 and not (partial and tp.rank) and not (twin and again),
    )  # fmt: skip


def _first_row(rows: int, mesh: Mesh) -> int:
    """Where this rank's rows begin: FSDP cuts dimension 0 as torch.chunk does, the last ranks may have none."""
    shard = mesh.axis("shard")
    return min(shard.rank * -(-rows // shard.size), rows)
