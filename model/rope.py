"""Rotary positions (Su et al., 2021), in the half-split form, with Llama 3's stretching."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from model.config import RopeScaling


def inverse_wavelengths(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a token for each of head_dim / 2 feature pairs, fp64 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    freq = theta**-exponent
    return freq if scaling is None else _stretch(freq, scaling)


def _stretch(freq: Tensor, s: RopeScaling) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, those between mixed linearly (Llama 3.1)."""
    wavelength = 2 * math.pi / freq
    kept = (s.original_seq_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * freq + (1.0 - kept) * freq / s.factor


def rotation_table(positions: Tensor, freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each token's angles.

    Args:
        positions: [T] int64, tokens since the document's start.
        freq: [head_dim / 2] fp64 from `inverse_wavelengths`.
        dtype: dtype of the result; angles are fp32 at least.

    Returns:
        Two tensors [T, head_dim / 2] of `dtype`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    angle = positions.to(wide)[:, None] * freq.to(wide)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Rotate(torch.autograd.Function):
    """y = x turned by its angles, times a constant; written straight into a contiguous result.

    The backward pass turns back by the same angles, so that nothing but the tables is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        """x [..., head_dim], any strides; cos and sin broadcast against [..., head_dim / 2]."""
        ctx.save_for_backward(cos, sin)
        ctx.scale = scale
        return _turn(x, cos, sin, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of x."""
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin, ctx.scale), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """[x1 cos - x2 sin, x2 cos + x1 sin] * scale for the halves x1, x2 of the last dimension."""
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = torch.addcmul(first * cos, second, sin, value=-1)
    out[..., half:] = torch.addcmul(second * cos, first, sin)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0) -> Tensor:
    """Differentiable rotation of x [..., head_dim]; see `Rotate`."""
    result: Tensor = Rotate.apply(x, cos, sin, scale)
    return result
