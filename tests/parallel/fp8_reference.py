"""FP8 quantisation by its definitions, in NumPy: a table of all 256 codes, and the nearest of them.

Arrays are fp32 unless said otherwise; a format is the table of its codes' values.
"""

from __future__ import annotations

import numpy as np

FLOAT_MAX = np.finfo(np.float32).max


def decoded(exponent_bits: int, infinity: bool) -> np.ndarray:
    """Values float64 [256] of all codes: a sign, an exponent, a mantissa. Without infinity the last code is NaN."""
    mantissa_bits = 7 - exponent_bits
    top, ones, bias = 2**exponent_bits - 1, 2**mantissa_bits - 1, 2 ** (exponent_bits - 1) - 1
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & top, code & ones
        size = ((exponent > 0) + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias)
        if exponent == top and infinity:
            size = np.nan if mantissa else np.inf
        elif exponent == top and mantissa == ones:
            size = np.nan
        values[code] = -size if code >> 7 else size
    return values


FORMATS = {"e4m3": decoded(4, infinity=False), "e5m2": decoded(5, infinity=True)}


def magnitudes(form: np.ndarray):
    """Finite values float64 of codes 0, 1, ... in order."""
    return form[:128][np.isfinite(form[:128])]


def largest(form: np.ndarray) -> np.float32:
    return np.float32(magnitudes(form)[-1])


def ties(form: np.ndarray):
    """Float64 halfway between codes n and n + 1."""
    return (magnitudes(form)[1:] + magnitudes(form)[:-1]) / 2


def nearest(x: np.ndarray, form: np.ndarray) -> np.ndarray:
    """Codes uint8 of the nearest finite values, of two the even code; NaN's is 0x7f."""
    size, between = np.abs(x).astype(np.float64), ties(form)
    below, above = np.searchsorted(between, size, "left"), np.searchsorted(between, size, "right")  # differ at a tie
    code = np.where(below % 2 == 0, below, above)
    return np.where(np.isnan(x), 0x7F, code + 128 * np.signbit(x)).astype(np.uint8)


def to_fp8(x: np.ndarray, scale: np.ndarray | np.float32, form: np.ndarray) -> np.ndarray:
    """Codes uint8 of x * scale; the product is exact in float64, then rounded once to fp32."""
    with np.errstate(all="ignore"):
        return nearest((x.astype(np.float64) * np.float64(scale)).astype(np.float32), form)


@np.errstate(all="ignore")
def delayed_scale(amax: np.ndarray, old: np.ndarray, form: np.ndarray, margin: int) -> np.ndarray:
    scale = np.minimum(largest(form) * np.float32(2.0**-margin) / amax, FLOAT_MAX)
    return np.where((amax == 0) | ~np.isfinite(amax), old, scale)


@np.errstate(all="ignore")
def current_scale(amax: np.ndarray, form: np.ndarray, power_of_two: bool = False) -> np.ndarray:
    scale = np.minimum(largest(form) / amax, FLOAT_MAX)
    if power_of_two:
        scale = np.ldexp(np.float32(0.5), np.frexp(scale)[1])
    return np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale)


@np.errstate(all="ignore")
def mx_exponent(amax: np.ndarray, form: np.ndarray) -> np.ndarray:
    """The least e of 0 to 254 with amax / largest <= 2^(e - 127), as int32; 255 of NaN."""
    quotient = amax * (1 / largest(form))
    fraction, exponent = np.frexp(quotient)  # fraction from a half to 1
    rounded_up = np.where(quotient > 0, exponent - (fraction == 0.5) + 127, 0).clip(0, 254)
    return np.select([np.isnan(amax), np.isinf(amax)], [255, 254], rounded_up).astype(np.int32)


def mx_scales(amax: np.ndarray, form: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What values are divided by, and multiplied by: both exact."""
    exponent = mx_exponent(amax, form)
    hidden = np.where(exponent == 255, np.float32(np.nan), np.float32(1))
    return np.ldexp(hidden, exponent - 127), np.ldexp(hidden, 127 - exponent)


def block_scales(amax: np.ndarray, form: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = current_scale(amax, form, power_of_two=True)
    return 1 / scale, scale


def quantize_blocks(x: np.ndarray, block: tuple[int, int], form: np.ndarray, scales) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 of x [rows, columns], and what each block's are multiplied by."""
    amax = np.empty([-(-size // step) for size, step in zip(x.shape, block, strict=True)], np.float32)
    for i, j in np.ndindex(amax.shape):
        amax[i, j] = np.abs(x[i * block[0] :, j * block[1] :][: block[0], : block[1]]).max()
    inverse, scale = scales(amax, form)
    return to_fp8(x, spread(scale, block, x.shape), form), inverse


def spread(of_blocks: np.ndarray, block: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """A number for each block -> one for each element, [rows, columns]."""
    row, column = np.indices(shape)
    return of_blocks[row // block[0], column // block[1]]
