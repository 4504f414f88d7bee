"""How far a layout's numbers may be from one process's: the one place where this is said.

Layouts add the same numbers in another order, so they differ by rounding alone. fp64's is so small that no
fault hides in it: that is where a layout is proven. An error is ||difference|| / ||value||, or, where one
process has a gradient of zero, the norm of the other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


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


# Rounding to FP8 magnifies what layouts differ by, and scales depend on the micro-batch: this tells no more than that
# nothing is badly wrong. The proof is in fp64, with FP8 operands: tests/parity/test_fp8.py.
_FP8 = Tolerance(loss=2e-2, norm=4e-1, gradient=4e-1, steps=1, parameter=inf)
TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, norm=1e-9, gradient=1e-9, steps=None, parameter=1e-9),
    "fp32": Tolerance(loss=1e-5, norm=1e-4, gradient=1e-5, steps=1, parameter=1e-3),
    "bf16": Tolerance(loss=1e-3, norm=5e-2, gradient=5e-2, steps=1, parameter=2e-1),
    # Measured over 20 steps of the 14 layouts of tests/parity/test_precisions.py, worst first: loss 1.3e-4 (tp2), norm
    # 8e-3 (tp4), gradient 3e-3 (tp2), parameter 1.1e-1 (tp2 pp2 dp2: a bias that has hardly moved from zero). Gradients
    # are ten times closer than bf16's, as fp16 has three bits more; after some steps of AdamW that is lost.
    "fp16": Tolerance(loss=5e-4, norm=3e-2, gradient=1e-2, steps=1, parameter=2e-1),
    **dict.fromkeys(("fp8_delayed", "fp8_current", "fp8_block", "mxfp8"), _FP8),
}
"""By precision.name."""
