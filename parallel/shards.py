"""Where each parameter that this rank holds lies in its global tensor. Every shard is one rectangle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Shards

from parallel.mesh import Axis, Mesh
from parallel.tensor import ParameterCut, parameter_cuts


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


def _shard(
    name: str, parameter: nn.Parameter, cut: ParameterCut | None, mesh: Mesh, twin: bool, again: bool
) -> Shard:  # fmt: skip
    tp, view = mesh.axis("tp"), mesh.shared
    replicate, sharing = view.axis("replicate"), view.axis("shard")
    shape, start = list(parameter.shape), [0] * parameter.dim()
    if cut is not None and cut.axis == "ep":
        replicate, sharing = mesh.expert.axis("edp_replicate"), mesh.expert.axis("edp_shard")
    if isinstance(parameter, DTensor):
        along = parameter.placements[-1]
        dimension = along.dim if isinstance(along, Shards) else 0
        start[dimension] = _first(shape[dimension], sharing)
    if cut is not None:
        axis = mesh.axis(cut.axis)
        start[cut.dimension] += axis.rank * shape[cut.dimension]
        shape[cut.dimension] *= axis.size
    partial = cut is None and tp.size > 1
    return Shard(
        name, parameter, tuple(shape), tuple(start), partial,
        copies=replicate.size * (tp.size if partial else 1) * (2 if twin else 1),
        writes=replicate.rank == 0 and not (partial and tp.rank) and not (twin and again),
    )  # fmt: skip


def _first(rows: int, sharing: Axis) -> int:
    """Where this rank's rows begin: FSDP cuts as torch.chunk does, the last ranks may have none."""
    return min(sharing.rank * -(-rows // sharing.size), rows)
