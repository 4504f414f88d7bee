"""The ranks as a table, in plain numbers: who stands where, and who belongs together.

ranks = arange(world).view(pp, replicate, shard, cp, tp)      tp fastest: its ranks talk most
the experts' table of the same ranks: (pp, edp_replicate, edp_shard, ep), ep fastest
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallel.config import ParallelConfig

AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the table of ranks, slowest first."""
DATA_AXES = ("pp", "replicate", "shard", "tp")
"""The same table as it shares parameters that are not an expert's: shard runs over the ranks of cp too."""
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep")
"""Axes of the experts' table of the same ranks, slowest first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes."""

    pp: int = 1
    """Ranks that share the layers."""
    replicate: int = 1
    """Groups that hold the same shards."""
    shard: int = 1
    """Ranks that share parameters, gradients or optimizer state."""
    cp: int = 1
    """Ranks that share the tokens of a sequence."""
    tp: int = 1
    """Ranks that share the matrices of a block."""
    ep: int = 1
    """Ranks that share the experts."""
    whole: bool = False
    """Whether ranks that read different tokens each hold whole parameters (zero=0)."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return self.pp, self.replicate, self.shard, self.cp, self.tp

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """In the order of EXPERT_AXES."""
        inner = self.shard * self.cp * self.tp
        if self.whole:
            return self.pp, self.replicate * inner // self.ep, 1, self.ep
        if inner % self.ep == 0:
            return self.pp, self.replicate, inner // self.ep, self.ep
        return self.pp, 1, self.replicate * inner // self.ep, self.ep

    @property
    def data_sizes(self) -> tuple[int, ...]:
        """In the order of DATA_AXES."""
        if self.whole:
            return self.pp, self.replicate * self.shard * self.cp, 1, self.tp
        return self.pp, self.replicate, self.shard * self.cp, self.tp

    @property
    def world(self) -> int:
        """All ranks."""
        return prod(self.sizes)

    @property
    def words(self) -> str:
        """Such as `pp 2, shard 4`, axes longer than 1."""
        named = [*zip(AXES, self.sizes, strict=True), ("ep", self.ep)]
        longer = [f"{axis} {size}" for axis, size in named if size > 1]
        return ", ".join(longer) or "one process"

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis to place of a rank."""
        return dict(zip(AXES, _unravel(rank, self.sizes), strict=True))

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """The same in the experts' table."""
        return dict(zip(EXPERT_AXES, _unravel(rank, self.expert_sizes), strict=True))

    def data_coordinates(self, rank: int) -> dict[str, int]:
        """The same in the table of DATA_AXES."""
        return dict(zip(DATA_AXES, _unravel(rank, self.data_sizes), strict=True))

    def dp_rank(self, rank: int) -> int:
        """Place among the ranks that read different samples."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def table(self, most: int = 16) -> list[str]:
        """Lines of rank -> coordinates, for axes longer than 1; the middle of a large table is left out."""
        shown = [axis for axis, size in zip(AXES, self.sizes, strict=True) if size > 1] or ["tp"]
        shown += ["ep"] if self.ep > 1 else []
        lines = []
        for rank in range(self.world):
            if self.world > most and most // 2 <= rank < self.world - most // 2:
                lines += ["  ..."] if rank == most // 2 else []
                continue
            at = self.coordinates(rank) | {"ep": self.expert_coordinates(rank)["ep"]}
            lines.append(f"  rank {rank:>{len(str(self.world - 1))}}: " + " ".join(f"{a} {at[a]}" for a in shown))
        return lines


def layout_of(config: ParallelConfig, world: int) -> Layout:
    """The layout of `world` ranks; the configuration has been checked against it."""
    dp = world // (config.pp * config.cp * config.tp)
    replicate = dp if config.zero == 0 else config.replicate
    return Layout(
        pp=config.pp, replicate=replicate, shard=dp // replicate, cp=config.cp, tp=config.tp, ep=config.ep,
        whole=config.zero == 0,
    )  # fmt: skip


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    places = []
    for size in reversed(sizes):
        index, place = divmod(index, size)
        places.append(place)
    return tuple(reversed(places))
