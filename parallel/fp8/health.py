"""How well FP8 holds what it is given: values lost at either end of the format, and the error of rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.fp8.formats import Format, Quantized

FIELDS = ("amax", "scale", "saturated", "underflow", "error")
"""Of a tensor in a step: largest value, its scale (the least of its blocks), shares of the values beyond the format's
largest and of those that became zero, and ||x - q(x)|| / ||x||."""
_SUMS, _MAXIMA = 5, 2


class Health:
    """What one part's linears saw in a step, for each row of their tables and kind of tensor.

    Nothing is done unless `watching`: it costs a few passes over each operand.
    """

    def __init__(self) -> None:
        self.watching = False
        self.sums = self.maxima = torch.empty(0)

    def allocate(self, rows: int, kinds: int, device: torch.device) -> None:
        """sums [rows, kinds, 5]: values, saturated, vanished, squares, squared errors; maxima [rows, kinds, 2]."""
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(rows, kinds, _SUMS, dtype=wide, device=device)
        self.maxima = torch.zeros(rows, kinds, _MAXIMA, dtype=wide, device=device)

    def begin(self, watching: bool) -> None:
        """Begin a step."""
        self.watching = watching
        if watching:
            self.sums.zero_()
            self.maxima.zero_()

    @torch.no_grad()
    def note(self, x: Tensor, made: Quantized, row: int, kind: int, form: Format) -> None:
        """x [rows, columns] became `made`."""
        if not self.watching or not x.numel():
            return
        exact, back = x.float(), made.dequantized(torch.float32)
        # What the format's largest value stands for is not saturated if it is right but for rounding.
        saturated = (made.values.float().abs() >= form.largest) & (exact.abs() > back.abs() * (1 + 2.0**-4))
        vanished = (back == 0) & (exact != 0)
        wide = self.sums.dtype
        sums = (saturated.sum(), vanished.sum(), exact.to(wide).square().sum(), (exact - back).to(wide).square().sum())
        count = torch.full((), x.numel(), dtype=wide, device=x.device)
        self.sums[row, kind] += torch.stack([count, *(each.to(wide) for each in sums)])
        largest = torch.stack([exact.abs().amax(), made.inverse.amax()]).to(wide)
        torch.maximum(self.maxima[row, kind], largest, out=self.maxima[row, kind])


def gathered(own: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """The `fp8` record of a step, the same on all ranks; all of them call this.

    Args:
        own: sums [n, kinds, 5] and maxima [n, kinds, 2] of this rank's linears, by name; n experts each.
        names: of the linears of the whole model.
        kinds: names of the kinds of tensors.

    Returns:
        The largest shares and error of the model, and FIELDS by linear and kind.
    """
    sums = torch.zeros(len(names), len(kinds), _SUMS, dtype=torch.float64)
    maxima = torch.zeros(len(names), len(kinds), _MAXIMA, dtype=torch.float64)
    for place, name in enumerate(names):
        if name in own:
            sums[place], maxima[place] = own[name][0].sum(0).cpu(), own[name][1].amax(0).cpu()
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = torch.device("cuda") if "nccl" in dist.get_backend() else torch.device("cpu")
        sums, maxima = sums.to(device), maxima.to(device)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    table = figures(sums, maxima).cpu()
    linears = {
        name: {kind: dict(zip(FIELDS, row, strict=True)) for kind, row in zip(kinds, rows, strict=True)}
        for name, rows in zip(names, table.tolist(), strict=True)
    }
    worst = dict(zip(FIELDS[2:], table[..., 2:].amax((0, 1)).tolist(), strict=True))
    return {**worst, "linears": linears}


def figures(sums: Tensor, maxima: Tensor) -> Tensor:
    """sums [..., 5] and maxima [..., 2] of all ranks -> FIELDS [..., 5] fp64."""
    values, saturated, vanished, squares, errors = sums.double().unbind(-1)
    amax, inverse = maxima.double().unbind(-1)
    count, norm = values.clamp(min=1), squares.clamp(min=1e-300)
    scale = torch.where(inverse > 0, inverse.reciprocal(), 0.0)
    return torch.stack([amax, scale, saturated / count, vanished / count, (errors / norm).sqrt()], -1)
