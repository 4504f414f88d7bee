"""How well FP8 holds what it is given: values lost at either end of the format, and the error of rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.fp8.formats import Format, Quantized

FIELDS = ("amax", "scale", "saturated", "underflow", "error")
"""Of a tensor in a step: largest value, its scale (the least of its blocks), shares of the values beyond the format's
largest and of those that became zero, and ||x - q(x)|| / ||x|| (where it was measured)."""


class Health:
    """Sums over a step, for each linear and kind of tensor; nothing is done unless `watching`."""

    def __init__(self) -> None:
        self.watching = self.measuring = False
        self.sums = self.extremes = torch.empty(0)

    def allocate(self, rows: int, kinds: int, device: torch.device) -> None:
        """sums [rows, kinds, 5]: values, saturated, vanished, squares, squared errors; extremes [rows, kinds, 2]."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(rows, kinds, 5, dtype=wide, device=device)
        self.extremes = torch.zeros(rows, kinds, 2, device=device)

    def begin(self, watching: bool, measuring: bool) -> None:
        """Begin a step.

        Args:
            watching: note extremes and what is lost, at the cost of a few passes over each operand.
            measuring: the error too.
        """
        self.watching, self.measuring = watching, watching and measuring
        if watching:
            self.sums.zero_()
            self.extremes.zero_()

    @torch.no_grad()
    def note(self, x: Tensor, made: Quantized, row: int, kind: int, form: Format) -> None:
        """x [rows, columns] became `made`."""
        if not self.watching or not x.numel():
            return
        back = made.dequantized(torch.float32)
        exact, inverse = x.float(), made.inverse
        beyond = (made.values.float().abs() >= form.largest) & (exact.abs() > back.abs() * (1 + 2.0**-4))
        vanished = (back == 0) & (exact != 0)
        squares = exact.double().square().sum() if self.measuring else exact.new_zeros(())
        errors = (exact - back).double().square().sum() if self.measuring else exact.new_zeros(())
        counts = beyond.new_full((), x.numel(), dtype=torch.int64), beyond.sum(), vanished.sum()
        self.sums[row, kind] += torch.stack([each.to(self.sums.dtype) for each in (*counts, squares, errors)])
        largest = torch.stack([exact.abs().amax(), inverse.amax()])
        torch.maximum(self.extremes[row, kind], largest, out=self.extremes[row, kind])


def figures(sums: Tensor, extremes: Tensor) -> Tensor:
    """sums [..., 5] and extremes [..., 2] of all ranks -> FIELDS [..., 5] fp64."""
    values, saturated, vanished, squares, errors = sums.double().unbind(-1)
    count = values.clamp(min=1)
    amax, inverse = extremes.double().unbind(-1)
    scale = torch.where(inverse > 0, inverse.reciprocal(), 0.0)
    return torch.stack(
        [amax, scale, saturated / count, vanished / count, (errors / squares.clamp(min=1e-300)).sqrt()], -1
    )
