"""Rounding to FP8 and back, with scales found as Transformer Engine finds them, on any device.

per tensor   q = round(x * scale), one scale: of past maxima (delayed) or of this tensor (current)
block        E4M3, a power of two for each 1 x 128 values (128 x 128 of a weight)   DeepSeek-V3, section 3.3
MX           E4M3, a power of two (E8M0) for each 32 values                         OCP Microscaling 1.0, section 6.3

Values are rounded to nearest, ties to even, and saturate at the format's largest; NaN stays NaN. Powers of two are
rounded down (block: mantissa cut off the scale) or up (MX: so that no value overflows).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FormatName = Literal["e4m3", "e5m2"]
BLOCK, MX_BLOCK = 128, 32


class Format(NamedTuple):
    """One of the two FP8 formats."""

    dtype: torch.dtype
    """PyTorch's name of it."""
    largest: float
    """Largest finite value."""
    bits: int
    """Of the mantissa."""
    least: float
    """Smallest normal value."""


FORMATS: dict[FormatName, Format] = {
    "e4m3": Format(torch.float8_e4m3fn, 448.0, 3, 2.0**-6),
    "e5m2": Format(torch.float8_e5m2, 57344.0, 2, 2.0**-14),
}
_FLOAT_MAX = torch.finfo(torch.float32).max
_EXPONENT, _MANTISSA, _MANTISSA_BITS = 0x7F800000, 0x007FFFFF, 23


def to_fp8(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    """x * scale [any], multiplied in fp32, rounded to FP8: bf16 of the same shape, where FP8 values are exact.

    Adding 1.5 * 2^k to a number and taking it off again rounds it to a multiple of 2^(k - 23): k by the exponent of
    each, or of the smallest normal value below that. On a CPU PyTorch's own casts there and back take twice as long.
    """
    y = (x.float() * scale).clamp_(-form.largest, form.largest)
    power = (y.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=form.least)
    shift = power.mul_(1.5 * 2.0 ** (_MANTISSA_BITS - form.bits))
    return (y + shift).sub_(shift).copysign_(y).to(torch.bfloat16)


def delayed_scale(amax: Tensor, old: Tensor, form: Format, margin: int) -> Tensor:
    """Scales fp32 from maxima fp32 of the same shape; `old` stays where a maximum is 0 or not finite."""
    scale = torch.full_like(amax, form.largest * 2.0**-margin) / amax  # a number / tensor is rounded twice
    scale = torch.where(scale.isinf(), _FLOAT_MAX, scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, old)


def current_scale(amax: Tensor, form: Format, power_of_two: bool = False) -> Tensor:
    """Scales fp32 from maxima fp32 of the same shape; 1 where a maximum is 0 or not finite.

    A scale that would overflow becomes the largest of fp32. power_of_two cuts the mantissa off.
    """
    scale = torch.full_like(amax, form.largest) / amax
    scale = torch.where(scale.isinf(), _FLOAT_MAX, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def mx_exponent(amax: Tensor, form: Format) -> Tensor:
    """Biased exponents (E8M0) int32 of the scale that values are divided by: amax / largest, rounded up.

    255, NaN's, where a maximum is NaN; 254 where it is infinite; 0 where it is 0.
    """
    quotient = amax * torch.tensor(1.0 / form.largest, dtype=torch.float32, device=amax.device)
    bits = quotient.view(torch.int32)
    exponent, mantissa = (bits & _EXPONENT) >> 23, bits & _MANTISSA
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + up.to(torch.int32)
    exponent = torch.where(amax.isinf(), 254, exponent)
    return torch.where(amax.isnan(), 255, exponent)


class Quantized(NamedTuple):
    """A matrix in FP8."""

    values: Tensor
    """[rows, columns] FP8 values, in bf16."""
    inverse: Tensor
    """What values are multiplied by, fp32: [], or one for each block [rows / r, columns / c], rounded up."""
    block: tuple[int, int] | None = None
    """Rows and columns (r, c) of a block; None: one scale for all."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns] in dtype; exact in bf16 where scales are powers of two within its range."""
        if self.block is None:
            return (self.values.float() * self.inverse).to(dtype)
        blocks = _blocks(self.values, self.block)
        return _matrix((blocks.float() * self.inverse[:, None, :, None]).to(dtype), self.values.shape)


def quantize_tensor(x: Tensor, scale: Tensor, form: Format) -> Quantized:
    """x [rows, columns] by one scale [] fp32."""
    return Quantized(to_fp8(x, scale, form), scale.reciprocal())


def quantize_blocks(x: Tensor, block: tuple[int, int], form: Format) -> Quantized:
    """x [rows, columns] by a power of two for each block; incomplete blocks at the ends have one of their own."""
    blocks = _blocks(x, block)
    scale = current_scale(_amax(blocks), form, power_of_two=True)
    values = to_fp8(blocks, scale[:, None, :, None], form)
    return Quantized(_matrix(values, x.shape), scale.reciprocal(), block)


def quantize_mx(x: Tensor, dim: int, form: Format) -> Quantized:
    """x [rows, columns] by a power of two for each 32 values along `dim`."""
    block = (MX_BLOCK, 1) if dim == 0 else (1, MX_BLOCK)
    blocks = _blocks(x, block)
    exponent = mx_exponent(_amax(blocks), form)
    inverse, scale = _power_of_two(exponent), _power_of_two(254 - exponent)
    hidden = exponent == 255
    inverse, scale = inverse.masked_fill(hidden, torch.nan), scale.masked_fill(hidden, torch.nan)
    return Quantized(_matrix(to_fp8(blocks, scale[:, None, :, None], form), x.shape), inverse, block)


def _power_of_two(biased: Tensor) -> Tensor:
    """2^(biased - 127) fp32, of int32 from 0 to 254."""
    normal = (biased.clamp(1, 254) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(biased > 0, normal, 2.0**-127)


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [rows, columns] -> [rows / r, r, columns / c, c], filled up with zeros where blocks are incomplete."""
    rows, columns = (-(-size // step) for size, step in zip(x.shape, block, strict=True))
    missing = columns * block[1] - x.shape[1], rows * block[0] - x.shape[0]
    padded = F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x
    return padded.view(rows, block[0], columns, block[1])


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Back from `_blocks`."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def _amax(blocks: Tensor) -> Tensor:
    """Largest absolute value of each of `_blocks`, fp32 [rows / r, columns / c]."""
    return blocks.abs().amax((1, 3)).float()
