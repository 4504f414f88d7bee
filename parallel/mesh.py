"""The process groups of a layout, each made once; a module gets the ones it needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from parallel.layout import AXES, Layout


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
class Mesh:
    """All axes of one rank."""

    layout: Layout
    """Sizes of the axes."""
    rank: int
    """Number of this rank in the world."""
    device_mesh: DeviceMesh | None
    """The same as PyTorch's; None for one process."""

    def axis(self, name: str) -> Axis:
        """One of AXES."""
        size = self.layout.sizes[AXES.index(name)]
        if self.device_mesh is None or size == 1:
            return ALONE
        return Axis(size, self.layout.coordinates(self.rank)[name], self.device_mesh.get_group(name))

    @property
    def data(self) -> DeviceMesh | None:
        """Ranks that share parameters: (shard), or (replicate, shard); None where there is one alone."""
        if self.device_mesh is None or self.layout.dp == 1:
            return None
        names = ("replicate", "shard") if self.layout.replicate > 1 else ("shard",)
        return self.device_mesh[names]

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return self.layout.dp_rank(self.rank)


def make_mesh(layout: Layout, rank: int, device: torch.device, timeout: int) -> Mesh:
    """The groups of a layout; every process of the run calls this, inside its process group.

    timeout: seconds that a collective may wait (groups do not take it over from the world's).
    """
    if layout.world == 1:
        return ONE_PROCESS
    mesh = init_device_mesh(device.type, layout.sizes, mesh_dim_names=AXES)
    for axis in AXES:
        _set_pg_timeout(timedelta(seconds=timeout), mesh.get_group(axis))
    return Mesh(layout, rank, mesh)


ONE_PROCESS = Mesh(Layout(), 0, None)
"""The mesh of a process alone."""
