"""Initial weights as a pure function of (seed, parameter name, element index).

No generator state exists: a rank that holds one rectangle of a tensor computes that rectangle alone, and
every layout starts from the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# splitmix64's constants (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"),
# as signed 64-bit integers, because torch has no unsigned arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_CUT = 3.0  # standard deviations kept on either side
_PIECE = 1 << 20  # elements hashed at one time, so that the fp64 temporaries stay small


def stream_key(seed: int, name: str) -> int:
    """Signed 64-bit key of one parameter's stream."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed_uniform(key: int, index: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), fp64, one for each int64 element of `index`, by splitmix64."""
    z = (index + 1) * _GAMMA + key
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    z = z ^ _shift(z, 31)
    return (_shift(z, 12).double() + 0.5) * 2.0**-52


def hashed_normal(key: int, index: Tensor) -> Tensor:
    """Standard normal numbers cut at three deviations, fp64, by the inverse of the distribution function."""
    low = 0.5 * math.erfc(_CUT / math.sqrt(2.0))
    normal: Tensor = torch.special.ndtri(low + (1.0 - 2.0 * low) * hashed_uniform(key, index))
    return normal


def flat_index(local: Sequence[int], whole: Sequence[int], start: Sequence[int], device: torch.device) -> Tensor:
    """Row-major indices in a tensor of shape `whole` of the rectangle of shape `local` that begins at `start`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, full, begin in zip(local, whole, start, strict=True):
        index = index.unsqueeze(-1) * full + torch.arange(begin, begin + size, device=device)
    return index


def fill_rectangle(
    out: Tensor, key: int, std: float, global_shape: Sequence[int], start: Sequence[int] | None = None
) -> None:
    """Fill `out` with its rectangle of a global tensor of N(0, std^2) cut at three deviations.

    Args:
        out: local tensor, any float dtype, at least one dimension; filled in place.
        key: `stream_key` of the parameter.
        std: standard deviation before the cut.
        global_shape: shape of the whole tensor.
        start: global index of the local element [0, 0, ...]; None: all zeros.
    """
    begin = tuple(start) if start is not None else (0,) * out.dim()
    row_stride = math.prod(global_shape[1:])
    within = flat_index(out.shape[1:], global_shape[1:], begin[1:], out.device)
    rows_a_piece = max(1, _PIECE // max(1, within.numel()))
    for row in range(0, out.shape[0], rows_a_piece):
        piece = out[row : row + rows_a_piece]
        rows = torch.arange(begin[0] + row, begin[0] + row + len(piece), device=out.device) * row_stride
        index = rows.view(-1, *[1] * within.dim()) + within
        piece.copy_(hashed_normal(key, index) * std)
