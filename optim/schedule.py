"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from optim.config import OptimConfig, ScheduleConfig


def peak_lr(config: OptimConfig, hidden: int) -> float:
    """The given peak, or one that falls with the model's width as published recipes' do.

    0.75 / hidden is 2.9e-3 at 256 features, 9.8e-4 at 768 (GPT-3's 125M: 6e-4), 1.8e-4 at 4096 (Llama 3 8B:
    3e-4) and 4.6e-5 at 16384 (405B: 8e-5).
    """
    return config.lr if config.lr is not None else 0.75 / hidden


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Steps of warm-up in a run of `total` steps."""
    return config.warmup if config.warmup is not None else min(2000, total // 10)


def lr_share(config: ScheduleConfig, step: int, total: int) -> float:
    """Learning rate of a step as a share of the peak.

    Args:
        step: steps done before this one (the first step is 0 and already moves).
        total: steps of the whole run; the last one has about min_ratio.
    """
    warmup = warmup_steps(config, total)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "wsd":
        done = 1.0 - (total - step - 1) / (config.decay_share * total)
    else:
        done = (step + 1 - warmup) / max(1, total - warmup)
    done = min(1.0, max(0.0, done))
    return config.min_ratio + (1.0 - config.min_ratio) * _shape(config, done)


def _shape(config: ScheduleConfig, done: float) -> float:
    """From 1 down to 0 (constant: 1) as `done` goes from 0 to 1 over the decay."""
    if config.name == "constant":
        return 1.0
    if config.name == "linear":
        return 1.0 - done
    if config.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    shapes = {"linear": 1.0 - done, "cosine": cosine, "sqrt": 1.0 - math.sqrt(done)}
    return shapes[config.decay_shape]
