"""Rows of a tensor in pieces, so that the passes of an activation find each other's results in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_PIECE = 1 << 17  # elements


def pieces(x: Tensor) -> Iterator[slice]:
    """Rows of x [m, f] in equal pieces that the cache holds; on other devices than CPUs all at once."""
    count = -(-x.numel() // _PIECE) if x.device.type == "cpu" else 1
    step = max(1, -(-len(x) // max(1, count)))
    return (slice(first, first + step) for first in range(0, len(x), step))
