"""How far a layout's numbers may be from one process's: the one place where this is said.

Layouts add the same numbers in another order, so they differ by rounding alone. fp64's is so small that no
fault hides in it: that is where a layout is proven. An error is ||difference|| / ||value||, or, where one
process has a gradient of zero, the norm of the other's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Largest errors of a layout against one process."""

    loss: float
    """Of each step's loss, and of the validation after the last step, relative."""
    norm: float
    """Of each step's gradient norm, relative."""
    gradient: float
    """Of each parameter's gradient, ||difference|| / ||gradient||."""
    steps: int | None
    """Steps whose gradients are compared; None: all (rounding grows as the weights part)."""
    parameter: float
    """Of each parameter after the last step, relative."""


TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, norm=1e-9, gradient=1e-9, steps=None, parameter=1e-9),
    "fp32": Tolerance(loss=1e-5, norm=1e-4, gradient=1e-5, steps=1, parameter=1e-3),
    "bf16": Tolerance(loss=1e-3, norm=5e-2, gradient=5e-2, steps=1, parameter=2e-1),
}
"""By precision.name."""
