"""Where this process computes, with how many threads, and how it makes fp32 products; each with its reason."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from errors import ConfigRefused
from parallel.precision import PrecisionConfig

Say = Callable[[str], None]
# Dense bf16/fp16 peaks in TFLOP/s, from the vendors' data sheets (never the figure with sparsity).
_BF16_PEAKS = (("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100", 989.0), ("A100", 312.0))
# fp32 without tensor cores, and fp64 with them where there are any.
_FP32_PEAKS = (("B200", 75.0), ("H200", 67.0), ("H100 PCIe", 51.0), ("H100", 67.0), ("A100", 19.5))
_FP64_PEAKS = (("B200", 37.0), ("H200", 67.0), ("H100 PCIe", 51.0), ("H100", 67.0), ("A100", 19.5))
# fp32 by tensor cores that round to TF32, dense.
_TF32_PEAKS = (("B200", 1125.0), ("H200", 494.0), ("H100 PCIe", 378.0), ("H100", 494.0), ("A100", 156.0))

_COMPUTE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# malloc.h: M_MMAP_MAX = -4 (no block comes straight from the system), M_TRIM_THRESHOLD = -1 and M_TOP_PAD = -2
# (what is freed stays, and the heap grows in large pieces).
_MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 256 << 20}
_TRUE_FP32 = 1e-6  # largest relative error of a product that may still be called fp32
_WORTH = 1.3  # how many times faster another form must be, well beyond the noise of a measurement


@dataclass(frozen=True)
class Choice:
    """An automatic decision and why it was taken."""

    value: str
    """What was chosen."""
    reason: str
    """Why."""


@dataclass(frozen=True)
class Machine:
    """What this process computes with."""

    device: torch.device
    """Where tensors live."""
    compute_dtype: torch.dtype
    """Dtype of activations and of the weights that products read."""
    master_dtype: torch.dtype
    """Dtype of the weights that the optimizer updates."""
    matmul: str
    """How fp32 products are made; must not change when a run goes on."""
    peak: float
    """FLOP/s that MFU is a share of."""
    measured: bool
    """Whether the peak was measured here, rather than given or published."""


def local_device(asked: str, local_rank: int) -> torch.device:
    """The device of one of several processes on a host: each has a GPU of its own."""
    kind = choose_device(asked).value
    if kind == "cpu":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigRefused(
            f"process {local_rank} of this host has no GPU of its own: {count} are visible; start at most {count} "
            "processes a host, or write train.device=cpu"
        )
    return torch.device(kind, local_rank if count > 1 else 0)  # Slurm may show each process its own one alone


def set_up_machine(
    asked: str, local_rank: int, threads: int | None, sharing: int, precision: PrecisionConfig, peak: float | None,
    matmul: str | None, say: Say,
) -> Machine:  # fmt: skip
    """Choose, set and announce device, threads, fp32 products and the peak.

    Args:
        asked, local_rank: as for `local_device`.
        threads: as in the train config.
        sharing: processes on this host that share the cores.
        peak: FLOP/s given by the user; None: published, or measured on a CPU (TFLOP/s).
        matmul: the choice of the run being resumed, kept where it is still true fp32; None: choose.
        say: prints a line.
    """
    target, where = local_device(asked, local_rank), choose_device(asked)
    count = choose_threads(threads, sharing)
    torch.set_num_threads(int(count.value))
    how = choose_matmul(precision, target, matmul)
    matmul = how.value
    torch.set_float32_matmul_precision(matmul)
    dtype = _COMPUTE[precision.compute]
    if target.type == "cpu":
        memory = keep_memory()
        say(f"freed memory: {memory.value} ({memory.reason})")
    best, source = find_peak(target, precision.name, dtype, peak)
    say(f"device: {where.value} ({where.reason}); CPU threads: {count.value} ({count.reason})")
    if precision.name != "fp32":
        how = half_products(dtype, target)
    say(f"precision: {precision.name}" + (f"; products: {how.value} ({how.reason})" if how.reason else ""))
    say(f"peak for MFU: {best / 1e12:.3f} TFLOP/s ({source})")
    return Machine(target, dtype, torch.promote_types(dtype, torch.float32), matmul, best, "measured" in source)


def keep_memory() -> Choice:
    """Have glibc keep freed memory for reuse instead of returning it to the system.

    Otherwise every large tensor of every step is fresh memory, whose pages the kernel hands over and clears
    one by one: a quarter of a CPU training step. Elsewhere than on Linux with glibc nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return Choice("the system's", "only glibc can be told to keep it")
    libc = ctypes.CDLL(None)
    done = [libc.mallopt(key, value) for key, value in _MALLOPT.items()]
    return Choice("kept", "no page faults in the steps") if all(done) else Choice("the system's", "mallopt refused")


def find_peak(device: torch.device, precision: str, dtype: torch.dtype, given: float | None) -> tuple[float, str]:
    """FLOP/s of the device and where the figure comes from."""
    if given is not None:
        return given * 1e12, "metrics.peak_tflops"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        published = published_peak(name, precision, torch.get_float32_matmul_precision())
        return (
            (published, f"published dense peak of {name}")
            if published
            else (measure_peak(dtype, device), "measured by products just now")
        )
    return measure_peak(dtype, device), "measured by products just now"


def published_peak(device_name: str, precision: str, matmul: str = "highest") -> float | None:
    """FLOP/s of a known accelerator in a precision; None for one that is not in the table."""
    fp32 = _FP32_PEAKS if matmul == "highest" else _TF32_PEAKS
    table = {"fp64": _FP64_PEAKS, "fp32": fp32}.get(precision, _BF16_PEAKS)
    for name, tflops in table:
        if all(word in device_name for word in name.split()):
            return tflops * 1e12
    return None


def choose_device(asked: str) -> Choice:
    """cpu or cuda for train.device = auto, cpu or cuda."""
    if asked != "auto":
        return Choice(asked, f"train.device={asked}")
    if torch.cuda.is_available():
        return Choice("cuda", torch.cuda.get_device_name())
    return Choice("cpu", "no CUDA device")


def choose_threads(asked: int | None, sharing: int = 1) -> Choice:
    """CPU threads: those asked for, else the share of the cores this process may run on."""
    if asked is not None:
        return Choice(str(asked), f"train.threads={asked}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sharing > 1:
        return Choice(str(max(1, cores // sharing)), f"{cores} cores for {sharing} processes")
    return Choice(str(cores), "the cores this process may use")


def _seconds(work: Callable[[], object], times: int = 7) -> float:
    """Median time of `work` after one warm-up."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def choose_matmul(config: PrecisionConfig, device: torch.device, kept: str | None = None) -> Choice:
    """How fp32 products are made, as torch.set_float32_matmul_precision names it.

    On some CPUs a lower setting only routes products to a faster library and stays true fp32; on others,
    and on CUDA, it rounds the inputs. So it is measured: speed, and error against fp64. `kept` is the choice
    of a run that goes on: its speed is not measured again, its error is.
    """
    if config.name != "fp32" or config.matmul != "auto":
        return Choice("highest" if config.matmul == "auto" else config.matmul, f"precision.matmul={config.matmul}")
    if device.type != "cpu":
        return Choice("highest", "TF32 is not fp32; ask for it with precision.matmul=high")
    before = torch.get_float32_matmul_precision()
    try:
        return _fastest_true_fp32() if kept is None else _kept_true_fp32(kept)
    finally:
        torch.set_float32_matmul_precision(before)


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 matrices [1024, 512] of irregular numbers."""
    index = torch.arange(1024 * 512, dtype=torch.float32)
    return torch.sin(index).view(1024, 512), torch.cos(index * 1.7).view(1024, 512)


def _product_error(setting: str) -> float:
    """Largest error of a product under a setting, which stays set, relative to the largest element in fp64."""
    x, w = _operands()
    torch.set_float32_matmul_precision(setting)
    exact = x.double() @ w.double().t()
    return float((torch.nn.functional.linear(x, w) - exact).abs().max() / exact.abs().max())


def _kept_true_fp32(kept: str) -> Choice:
    """The kept setting, or highest on a machine where it would round."""
    if kept == "highest" or _product_error(kept) <= _TRUE_FP32:
        return Choice(kept, "as this run began")
    return Choice("highest", f"this run began with {kept}, which is not true fp32 on this machine")


def _fastest_true_fp32() -> Choice:
    """The fastest setting whose products are fp32, if it is worth leaving the default."""
    x, w = _operands()
    seconds, errors = {}, {}
    for setting in ("highest", "high", "medium"):
        errors[setting] = _product_error(setting)
        seconds[setting] = _seconds(lambda: torch.nn.functional.linear(x, w))
    for setting in ("medium", "high"):
        gain = seconds["highest"] / seconds[setting]
        if errors[setting] <= _TRUE_FP32 and gain >= _WORTH:
            return Choice(setting, f"{gain:.1f}x faster here, error {errors[setting]:.0e}: still fp32")
    return Choice("highest", "no faster setting is true fp32 here")


def half_products(dtype: torch.dtype, device: torch.device) -> Choice:
    """How 16-bit products are made: on CUDA summed in fp32 throughout, on a CPU by whatever it has, measured."""
    if dtype.itemsize != 2:
        return Choice(str(dtype), "")
    if device.type == "cuda":
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
        return Choice("16-bit factors", "summed in fp32 throughout")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(_fastest_true_fp32().value)  # as a run in fp32 would make its products
    try:
        plain, half = (
            _seconds(partial(torch.nn.functional.linear, *(each.to(form) for each in _operands())))
            for form in (torch.float32, dtype)
        )
    finally:
        torch.set_float32_matmul_precision(before)
    if half < plain:
        return Choice("16-bit", f"{plain / half:.1f}x the speed of fp32 here")
    return Choice("16-bit", f"{half / plain:.1f}x slower than fp32 on this CPU: precision=fp32 trains faster")


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best of a few products on this device, in about half a second."""
    best = 0.0
    scale = 4 if device.type == "cuda" else 1
    for rows, inner, columns in ((2048, 512, 1536), (1024, 1024, 1024), (2048, 512, 512)):
        x = torch.ones(rows * scale, inner * scale, dtype=dtype, device=device)
        w = torch.ones(columns * scale, inner * scale, dtype=dtype, device=device)
        flops = 2.0 * x.numel() * len(w)
        end = time.perf_counter() + 0.15
        _product_seconds(x, w)
        while time.perf_counter() < end:
            best = max(best, flops / _product_seconds(x, w))
    return best


def _product_seconds(x: torch.Tensor, w: torch.Tensor) -> float:
    """Time of x w^T, x [rows, inner], w [columns, inner]."""
    start = time.perf_counter()
    torch.nn.functional.linear(x, w)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
