"""Tokens a second, MFU and HFU, and the peak they are shares of."""

from __future__ import annotations

from dataclasses import dataclass

# Dense bf16/fp16 peaks in TFLOP/s, from the vendors' data sheets (never the figure with sparsity).
_BF16_PEAKS = (("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100", 989.0), ("A100", 312.0))
# fp32 without tensor cores, and fp64 with them where there are any.
_FP32_PEAKS = (("B200", 75.0), ("H200", 67.0), ("H100 PCIe", 51.0), ("H100", 67.0), ("A100", 19.5))
_FP64_PEAKS = (("B200", 37.0), ("H200", 67.0), ("H100 PCIe", 51.0), ("H100", 67.0), ("A100", 19.5))


def published_peak(device_name: str, precision: str) -> float | None:
    """FLOP/s of a known accelerator in a precision; None for one that is not in the table."""
    table = {"fp64": _FP64_PEAKS, "fp32": _FP32_PEAKS}.get(precision, _BF16_PEAKS)
    for name, tflops in table:
        if all(word in device_name for word in name.split()):
            return tflops * 1e12
    return None


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
