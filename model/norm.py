"""RMSNorm (Zhang and Sennrich, 2019): x / rms(x) * weight over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 256  # rows worked on at a time, so that the fp32 copies stay in the cache


class _PiecewiseNorm(torch.autograd.Function):
    """For CPUs, where PyTorch makes the norm of ten passes over memory: rows by pieces, in fp32 or fp64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [rows, size], weight [size] -> [rows, size]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        out, factor = torch.empty_like(x), x.new_empty(len(x), 1, dtype=wide)
        for row in range(0, len(x), _ROWS):
            piece = slice(row, row + _ROWS)
            y = x[piece].to(wide, copy=True)
            mean_square = torch.linalg.vecdot(y, y).div_(x.shape[-1])
            factor[piece, 0] = mean_square.add_(eps).rsqrt_()
            out[piece] = y.mul_(factor[piece]).mul_(weight)
        ctx.save_for_backward(x, weight, factor)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and weight."""
        x, weight, factor = ctx.saved_tensors
        w = weight.to(factor.dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        for row in range(0, len(x), _ROWS):
            piece = slice(row, row + _ROWS)
            unit = x[piece].to(w.dtype, copy=True).mul_(factor[piece])
            g = grad[piece].to(w.dtype, copy=True)
            product = g * unit
            dw += product.sum(0)
            along = (product @ w).div_(-x.shape[-1])[:, None]
            dx[piece] = g.mul_(w).addcmul_(unit, along).mul_(factor[piece])
        return dx, dw.to(weight.dtype), None


class RMSNorm(nn.Module):
    """x [..., size] -> [..., size]."""

    def __init__(self, size: int, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised in fp32 at least, returned in x's dtype."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        result: Tensor = _PiecewiseNorm.apply(x.reshape(-1, x.shape[-1]), self.weight, self.eps)
        return result.view(x.shape)
