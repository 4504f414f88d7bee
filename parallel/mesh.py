"""The process groups of a layout, each made once; a module gets the ones it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from parallel.layout import AXES, DATA_AXES, EXPERT_AXES, Layout


@dataclass(frozen=True)
class Axis:
    """This rank's place on one axis of the mesh."""

    size: int = 1
    """Ranks along the axis."""
    rank: int = 0
    """Place on it."""
    group: ProcessGroup | None = None
    """The ranks that differ from this one along this axis alone; None where there are no others."""


ALONE = Axis()
"""An axis with this rank alone on it."""


@dataclass(frozen=True)
class View:
    """One table of the ranks: this rank's places in it, and PyTorch's form of it."""

    sizes: dict[str, int]
    """Axis to ranks along it."""
    places: dict[str, int]
    """Axis to place of this rank."""
    device_mesh: DeviceMesh | None
    """None for one process."""

    def axis(self, name: str) -> Axis:
        """One axis."""
        if self.device_mesh is None or self.sizes[name] == 1:
            return ALONE
        return Axis(self.sizes[name], self.places[name], self.device_mesh.get_group(name))

    def pair(self, replicate: str, shard: str) -> DeviceMesh | None:
        """The two axes over which FSDP shares parameters, or the latter alone where there is one replica."""
        if self.device_mesh is None:
            return None
        return self.device_mesh[(replicate, shard) if self.sizes[replicate] > 1 else (shard,)]


@dataclass(frozen=True)
class Mesh:
    """All axes of one rank."""

    layout: Layout
    """Sizes of the axes."""
    rank: int
    """Number of this rank in the world."""
    main: View
    """By AXES."""
    shared: View
    """By DATA_AXES: who shares parameters."""
    expert: View
    """By EXPERT_AXES: who shares experts."""
    tokens: Axis
    """cp and tp together: the ranks that share the tokens of a micro-batch."""
    stage: Axis = ALONE
    """All ranks with the same layers."""
    twins: Axis = ALONE
    """All ranks with the same experts."""

    def axis(self, name: str) -> Axis:
        """One of AXES, or ep."""
        return self.expert.axis(name) if name == "ep" else self.main.axis(name)

    @property
    def data(self) -> DeviceMesh | None:
        """Ranks that share parameters: (shard), or (replicate, shard); None where nothing is shared."""
        return self.shared.pair("replicate", "shard") if self._shares else None

    @property
    def expert_data(self) -> DeviceMesh | None:
        """The same for an expert's parameters."""
        return self.expert.pair("edp_replicate", "edp_shard") if self._shares else None

    @property
    def _shares(self) -> bool:
        """Whether FSDP is needed: for all parameters then, if only with one rank, so that they are made alike."""
        pairs = ((self.shared, ("replicate", "shard")), (self.expert, ("edp_replicate", "edp_shard")))
        return any(view.device_mesh and view.sizes[axis] > 1 for view, axes in pairs for axis in axes)

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return self.layout.dp_rank(self.rank)


def make_mesh(
    layout: Layout, rank: int, device: torch.device, timeout: int, experts: bool = False, maxima: bool = False
) -> Mesh:
    """The groups of a layout; every process of the run calls this, inside its process group.

    Args:
        timeout: seconds that a collective may wait (groups do not take it over from the world's).
        experts: whether the model has any, which need groups of their own.
        maxima: whether ranks with the same layers, or experts, agree on scales, for which they need groups.
    """
    if layout.world == 1:
        return ONE_PROCESS

    def table(sizes: Sequence[int], axes: Sequence[str]) -> DeviceMesh:
        mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(axes))
        for axis in axes:
            _set_pg_timeout(timedelta(seconds=timeout), mesh.get_group(axis))
        return mesh

    main = table(layout.sizes, AXES)
    shared = main if layout.cp == 1 else table(layout.data_sizes, DATA_AXES)
    tokens = layout.cp * layout.tp
    pair = table((layout.world // tokens, tokens), ("rest", "tokens")) if min(layout.cp, layout.tp) > 1 else None
    expert = table(layout.expert_sizes, EXPERT_AXES) if experts else None
    views = _views(layout, rank, main, shared, expert)
    together = views[0].axis("tp" if layout.cp == 1 else "cp")
    if pair is not None:
        together = Axis(tokens, rank % tokens, pair.get_group("tokens"))
    if not maxima:
        return Mesh(layout, rank, *views, together)
    stage, (pp, *data, ep) = layout.world // layout.pp, layout.expert_sizes
    same = table((layout.pp, stage), ("rest", "stage"))
    twins = table((pp, prod(data), ep), ("rest", "twins", "others")) if experts and prod(data) > 1 else None
    return Mesh(
        layout, rank, *views, together, Axis(stage, rank % stage, same.get_group("stage")) if stage > 1 else ALONE,
        Axis(prod(data), rank // ep % prod(data), twins.get_group("twins")) if twins else ALONE,
    )  # fmt: skip


def _views(
    layout: Layout, rank: int, main: DeviceMesh | None, shared: DeviceMesh | None, expert: DeviceMesh | None
) -> tuple[View, View, View]:
    return (
        View(dict(zip(AXES, layout.sizes, strict=True)), layout.coordinates(rank), main),
        View(dict(zip(DATA_AXES, layout.data_sizes, strict=True)), layout.data_coordinates(rank), shared),
        View(dict(zip(EXPERT_AXES, layout.expert_sizes, strict=True)), layout.expert_coordinates(rank), expert),
    )


ONE_PROCESS = Mesh(Layout(), 0, *_views(Layout(), 0, None, None, None), ALONE)
"""The mesh of a process alone."""
