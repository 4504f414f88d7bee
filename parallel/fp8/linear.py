"""x w^T with all three products of forward and backward made from FP8 operands, by their arithmetic on any device.

y  = X W^T      sums over the inputs        X, W quantised along them
dx = G W        sums over the outputs       G, W quantised along them
dw = G^T X      sums over the tokens        G, X quantised along them

FP8 values are exact in bf16, whose products are summed in fp32 and rounded to bf16. With one scale a tensor the result
is then multiplied by both inverses, in fp32, and rounded again; with a power of two a block the operands are, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.fp8.formats import Quantized
from parallel.fp8.state import Slot
from parallel.later import LaterGradients


def fp8_linear(x: Tensor, weight: nn.Parameter, slot: Slot, later: LaterGradients | None) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out] in the dtype of x."""
    result: Tensor = _Grouped.apply(x, weight, [len(x)], slot, later)
    return result


def fp8_grouped(
    rows: Tensor, weight: nn.Parameter, counts: Sequence[int], slot: Slot, later: LaterGradients | None
) -> Tensor:
    """rows [M, in] sorted by expert, weight [E, out, in], counts of each expert's rows -> [M, out]."""
    result: Tensor = _Grouped.apply(rows, weight, list(counts), slot, later)
    return result


def _wide(made: Quantized, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A factor of a product in dtype, and what the product is multiplied by afterwards."""
    if made.block is None:
        return made.values.to(dtype), made.inverse
    return made.dequantized(dtype), None


def _product(left: Tensor, right: Tensor, *inverses: Tensor | None) -> Tensor:
    """left @ right, times all inverses."""
    out = left @ right
    known = [inverse for inverse in inverses if inverse is not None]
    if not known:
        return out
    # A device's own product of bf16 and an fp32 scalar would round the scalar to bf16.
    wide = torch.promote_types(out.dtype, torch.float32)
    return out.to(wide).mul_(torch.stack(known).prod()).to(out.dtype)


class _Grouped(torch.autograd.Function):
    """Several linears side by side, each with scales of its own; one, for a weight of two dimensions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, counts: list[int], slot: Slot, later: LaterGradients | None
    ) -> Tensor:
        """See `fp8_grouped`."""
        weights = weight.detach().view(-1, *weight.shape[-2:])
        out = x.new_empty(len(x), weights.shape[1])
        kept: list[Quantized] = []
        for number, (rows, own, place) in enumerate(zip(x.split(counts), weights, out.split(counts), strict=True)):
            left, right = slot.operand(rows, "x", number), slot.weight(own, number)
            (a, by_a), (b, by_b) = _wide(left.last, x.dtype), _wide(right.last, x.dtype)
            place.copy_(_product(a, b.t(), by_a, by_b))
            kept += [left.first, right.first]
        ctx.save_for_backward(*(tensor for each in kept for tensor in each[:2]))
        ctx.blocks = [each.block for each in kept]
        ctx.weight, ctx.counts, ctx.slot, ctx.later = weight, counts, slot, later
        ctx.opens = slot.fp8.opens()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients of x and weight, the latter now or later."""
        saved, slot = ctx.saved_tensors, ctx.slot
        kept = [Quantized(saved[2 * n], saved[2 * n + 1], block) for n, block in enumerate(ctx.blocks)]
        dx, operands = [], []
        for number, rows in enumerate(grad.contiguous().split(ctx.counts)):
            g = slot.operand(rows, "g", number)
            (a, by_a), (b, by_b) = _wide(g.last, grad.dtype), _wide(kept[2 * number + 1], grad.dtype)
            dx.append(_product(a, b, by_a, by_b))
            operands.append((g.first, kept[2 * number]))
        if ctx.opens:
            slot.fp8.backward_ends()
        make = partial(_weight_gradient, operands, ctx.weight.shape, grad.dtype)
        gradient = torch.cat(dx) if len(dx) > 1 else dx[0]
        if ctx.later is None:
            return gradient, make(), None, None, None
        ctx.later.waiting.append((ctx.weight, make))
        return gradient, None, None, None, None


def _weight_gradient(operands: list[tuple[Quantized, Quantized]], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """G^T X of each linear, in the shape of their weight."""
    made = []
    for g, x in operands:
        (a, by_a), (b, by_b) = _wide(g, dtype), _wide(x, dtype)
        made.append(_product(a.t(), b, by_a, by_b))
    return torch.stack(made).view(shape) if len(made) > 1 else made[0].view(shape)
