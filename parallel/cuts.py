"""What a model's modules need to know of the cut: the ranks they share their work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallel.mesh import ALONE, Axis
from parallel.tensor import LaterGradients, Linears


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
    linears: Linears = field(init=False)
    """Makes linears cut over tp."""

    def __post_init__(self) -> None:
        """Linears follow from the rest."""
        object.__setattr__(self, "linears", Linears(self.tp, self.later))
