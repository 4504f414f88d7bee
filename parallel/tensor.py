"""Linears and the embedding, cut over the tensor-parallel ranks (Shoeybi et al., 2019; Korthikanti et al., 2022).

            rank 0          rank 1
x           first tokens    last tokens       [T/tp, h]       norms and residuals work on these (sequence parallel)
gather      all tokens      all tokens        [T, h]
column      rows 0          rows 1            [T, out/tp]     of qkv, gate, up: whole heads
row         columns 0       columns 1         [T, h]          of out, down: each rank has an addend
scatter     first tokens    last tokens       [T/tp, h]       their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import gather_tokens, scatter_sum
from parallel.fp8.state import FP8, Slot
from parallel.fp8.te import linear_product
from parallel.later import LaterGradients
from parallel.mesh import ALONE, Axis
from parallel.remade import Recipe, keeping


class _LaterLinear(torch.autograd.Function):
    """x w^T whose backward makes the gradient of x and puts off that of w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, later: LaterGradients) -> Tensor:
        """x [T, in], weight [out, in] -> [T, out]."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x; the rest waits."""
        (x,) = ctx.saved_tensors
        ctx.later.waiting.append((ctx.weight, partial(torch.mm, grad.t(), x)))
        return grad @ ctx.weight, None, None


class CutLinear(nn.Module):
    """A linear of which this rank holds some rows or columns; `cut_along` says along which dimension of what."""

    slots: dict[str, Slot]
    """Its scales by the parameter that they are for; empty where it is not in FP8."""

    def __init__(
        self, columns: int, rows: int, bias: bool, cuts: dict[str, int], linears: Linears, device: torch.device | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device))
        self.bias = nn.Parameter(torch.empty(rows, device=device)) if bias else None
        self.cut_along, self.later, self.axis = cuts, linears.later, linears.axis
        self.slots = {"weight": linears.fp8.linear(rows, columns)} if linears.fp8 else {}

    @property
    def in_fp8(self) -> bool:
        """Whether the coming product is."""
        return bool(self.slots) and self.slots["weight"].fp8.active

    def product(self, x: Tensor, again: Recipe | None, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> x w^T + bias; `again` is kept instead of the tensor that it makes, if x is that."""
        if self.in_fp8:  # what is kept is in FP8
            out = linear_product(x, self.weight, self.slots["weight"], self.later)
        elif self.later is None:
            with keeping(again):
                return F.linear(x, self.weight, bias)
        else:
            with keeping(again):
                out = _LaterLinear.apply(x, self.weight, self.later)
        return out if bias is None else out + bias


class ColumnLinear(CutLinear):
    """x [T, in] -> [T, out/tp]: this rank's outputs."""

    def forward(self, x: Tensor, again: Recipe | None = None) -> Tensor:
        """x [T, in] of all tokens."""
        return self.product(x, again, self.bias)


class RowLinear(CutLinear):
    """x [T, in/tp] -> [T/tp, out]: the addends of all ranks, summed, for this rank's tokens."""

    def forward(self, x: Tensor, again: Recipe | None = None) -> Tensor:
        """x [T, in/tp] of all tokens; the bias is added once, after the sum."""
        if self.axis.group is None:
            return self.product(x, again, self.bias)
        summed = scatter_sum(self.product(x, again), self.axis)
        return summed if self.bias is None else summed + self.bias


class VocabularyEmbedding(nn.Module):
    """Rows of the table of which this rank holds a share: tokens [T] -> [T/tp, hidden]."""

    cut_along: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, rows: int, hidden: int, axis: Axis, device: torch.device | None) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(rows // axis.size, hidden, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of other ranks count as zero here; the sum has every row once."""
        if self.axis.group is None:
            return F.embedding(tokens, self.weight)
        rows = len(self.weight)
        local = tokens - self.axis.rank * rows
        own = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight) * own[:, None]
        return scatter_sum(found, self.axis)


@dataclass(frozen=True)
class Linears:
    """Makes the linears of a model: how they are cut, and who makes their products."""

    axis: Axis = ALONE
    """The tensor-parallel ranks."""
    later: LaterGradients | None = None
    """Where products for the weights' gradients wait; None: made in the backward pass."""
    fp8: FP8 | None = None
    """Makes the products in FP8; None: in the dtype of the weights."""

    def column(self, columns: int, rows: int, bias: bool, device: torch.device | None) -> ColumnLinear:
        """`rows` outputs in all, cut over the ranks."""
        return ColumnLinear(columns, rows // self.axis.size, bias, {"weight": 0, "bias": 0}, self, device)

    def row(self, columns: int, rows: int, bias: bool, device: torch.device | None) -> RowLinear:
        """`columns` inputs in all, cut over the ranks."""
        return RowLinear(columns // self.axis.size, rows, bias, {"weight": 1}, self, device)

    def gather(self, x: Tensor) -> Tensor:
        """x [T/tp, h] -> [T, h]: what a column linear reads."""
        return gather_tokens(x, self.axis)


@dataclass(frozen=True)
class ParameterCut:
    """How a parameter is cut, before FSDP cuts what is left."""

    axis: str
    """tp or ep."""
    dimension: int
    """Which dimension."""


def parameter_cuts(module: nn.Module) -> dict[str, ParameterCut | None]:
    """Parameter name to its cut; None: every rank of tp holds the whole.

    A module says in `cut_along` which dimension of its own parameters is cut, in `cut_axis` (tp) among whom.
    """
    found: dict[str, ParameterCut | None] = {}
    for prefix, owner in module.named_modules():
        axis, cuts = getattr(owner, "cut_axis", "tp"), getattr(owner, "cut_along", {})
        for name, _ in owner.named_parameters(recurse=False):
            cut = ParameterCut(axis, cuts[name]) if name in cuts else None
            found[f"{prefix}.{name}" if prefix else name] = cut
    return found
