"""What a model's modules need to know of the cut: the ranks they share their work with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from parallel.fp8.state import FP8, Room
from parallel.later import LaterGradients
from parallel.mesh import ALONE, Axis
from parallel.tensor import Linears


@dataclass(frozen=True)
class Cuts:
    """The ranks along each axis, for one part of the model."""

    tp: Axis = ALONE
    """Ranks that share matrices, and between them tokens."""
    cp: Axis = ALONE
    """Ranks that share the tokens of each sequence."""
    exchange: Literal["ring", "all_gather"] = "ring"
    """How those see each other's keys and values."""
    ep: Axis = ALONE
    """Ranks that share experts."""
    tokens: Axis = ALONE
    """cp and tp together: ranks that share the tokens of a micro-batch."""
    later: LaterGradients | None = None
    """Where products for the weights' gradients wait; None: made in the backward pass."""
    fp8: FP8 | None = None
    """Makes products in FP8; None: there are none."""
    layer: int = 0
    """Number of the block that modules are made for."""

    def of_layer(self, layer: int) -> Cuts:
        """The same for one block."""
        return replace(self, layer=layer)

    def fp8_of(self, room: Room) -> FP8 | None:
        """What makes the products of these linears of the block; None: they are not in FP8."""
        return self.fp8 if self.fp8 and self.fp8.covers(room, self.layer) else None

    def linears(self, room: Room) -> Linears:
        """Makes linears cut over tp."""
        return Linears(self.tp, self.later, self.fp8_of(room))
