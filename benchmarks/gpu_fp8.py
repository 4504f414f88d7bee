"""What `benchmarks.gpu_check` asks of FP8: the emulation on the device, and Transformer Engine beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.gpu_sections import (
    STEPS,
    Figure,
    Setting,
    apart,
    curve,
    measured,
    release,
    small,
    speed_config,
    trial_corpus,
)
from data.batch import StepBatch
from parallel.fp8.choose import choose_backend
from parallel.fp8.formats import (
    FORMATS,
    Format,
    Quantized,
    current_scale,
    quantize_blocks,
    quantize_mx,
    quantize_tensor,
)
from parallel.fp8.linear import fp8_linear
from parallel.fp8.state import FP8
from parallel.precision import FP8Config, PrecisionConfig, PrecisionName

RECIPES: tuple[PrecisionName, ...] = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8")
ROUNDING = 1e-3  # of bf16 results that differ by the order of fp32 sums: a few of them by a last bit
NEAR_BF16 = 3e-2  # relative difference of a loss within 20 steps, on a CPU at most 1.1e-2
NEAR_EMULATION = 2e-2  # the same between two ways to make the same products


def formats(setting: Setting) -> Iterator[Figure]:
    """Rounding on the device against rounding on a CPU, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 320, generator=generator) * torch.logspace(-12, 12, 320)
    x[:, ::29], x[5, 5], x[6, 7] = 0.0, torch.inf, torch.nan
    for name, form in FORMATS.items():
        pairs = zip(_all_ways(x, form), _all_ways(x.to(setting.device), form), strict=True)
        differ = sum(_differ(a.values, b.values) + _differ(a.inverse, b.inverse) for a, b in pairs)
        yield Figure(f"{name}: values and scales that differ from a CPU's", differ, "", 0)
    yield Figure("a linear and its gradients: error beside a CPU's", _linear_error(setting.device), "", ROUNDING)


def _all_ways(x: Tensor, form: Format) -> list[Quantized]:
    """x by one scale, by blocks and by MX blocks."""
    return [
        quantize_tensor(x, current_scale(x[:4].abs().amax(), form), form),
        quantize_blocks(x, (1, 128), form),
        quantize_blocks(x, (128, 128), form),
        quantize_mx(x, 0, form),
        quantize_mx(x, 1, form),
    ]


def _linear_error(device: torch.device) -> float:
    """Largest relative distance of outputs and gradients from a CPU's, one scale a tensor, in bf16."""

    def results(where: torch.device) -> list[Tensor]:
        scales = FP8(PrecisionConfig("fp8_current"), layers=1)
        slot = scales.slot()
        scales.allocate(where)
        x = draw[0].clone().to(where).requires_grad_()
        weight = nn.Parameter(draw[1].clone().to(where))
        with scales.forward(first=True, keeps=True):
            y = fp8_linear(x, weight, slot, None)
        y.backward(draw[2].to(where))
        return [each.detach().float().cpu() for each in (y, x.grad, weight.grad) if each is not None]

    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((128, 256), (192, 256), (128, 192))]
    pairs = zip(results(device), results(torch.device("cpu")), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def _differ(one: Tensor, other: Tensor) -> int:
    """Elements that are not the same; NaN is NaN."""
    there = other.cpu()
    return int(((one != there) & ~(one.isnan() & there.isnan())).sum())


def fp8(setting: Setting) -> Iterator[Figure]:
    """Each recipe trains as bf16 does; where Transformer Engine has it, as its emulation does, and how fast."""
    yield from formats(setting)
    base = small("dense", "bf16", setting.quick)
    recipes = RECIPES[:1] if setting.quick else RECIPES
    with trial_corpus(base, STEPS) as batches:
        wanted = curve(base, batches, setting.device)
        for recipe in recipes:
            precision = PrecisionConfig(recipe, fp8=FP8Config(backend="emulate"))
            emulated = curve(replace(base, precision=precision), batches, setting.device)
            yield Figure(f"{recipe} emulated: loss against bf16", apart(emulated.losses, wanted.losses), "", NEAR_BF16)
            choice = choose_backend(PrecisionConfig(recipe), setting.device)
            if choice.value == "te":
                found = curve(replace(base, precision=PrecisionConfig(recipe)), batches, setting.device)
                off = apart(found.losses, emulated.losses)
                yield Figure(f"{recipe} by Transformer Engine: loss against emulation", off, "", NEAR_EMULATION)
            else:
                yield Figure(f"{recipe}: {choice.reason}", 0.0)
    yield from _speeds(setting, recipes)


def _speeds(setting: Setting, recipes: Sequence[PrecisionName]) -> Iterator[Figure]:
    """Step time of the 1b shape by Transformer Engine; emulation is no matter of speed."""
    base, steps = speed_config(setting), 3 if setting.quick else 10
    able = [r for r in recipes if choose_backend(PrecisionConfig(r), setting.device).value == "te"]
    if not able:
        return
    with trial_corpus(base, steps + 3) as batches:
        for recipe in able:
            yield from _speed(setting, recipe, batches)


def _speed(setting: Setting, recipe: PrecisionName, batches: Sequence[StepBatch]) -> Iterator[Figure]:
    release()
    config = replace(speed_config(setting), precision=PrecisionConfig(recipe))
    yield from measured(config, batches, setting, recipe)
