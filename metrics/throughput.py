"""Tokens a second, MFU and HFU, and the peak they are shares of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Speed of one step on this many devices."""

    tokens_per_s: float
    """Tokens a second."""
    mfu: float
    """Model FLOPs over the peak: the share that the mathematics needs."""
    hfu: float
    """The same with recomputed FLOPs counted."""


def throughput(tokens: int, flops: int, recomputed: int, seconds: float, peak: float) -> Throughput:
    """Speed of a step of `tokens` and `flops` (+ `recomputed`) in `seconds`; `peak` FLOP/s of all devices."""
    return Throughput(tokens / seconds, flops / seconds / peak, (flops + recomputed) / seconds / peak)


def format_duration(seconds: float) -> str:
    """45s, 12m05s, 3h07m, 2d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
