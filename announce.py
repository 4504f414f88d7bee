"""What a start of a run says of itself before it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conf.dependence import layout_dependent
from conf.resolve import ramp_of, run_directory, run_name, total_steps
from conf.schema import Config
from model.config import ModelConfig
from model.parts import layers_of_stages
from optim.schedule import warmup_steps
from parallel.device import Choice, Machine
from parallel.layout import Layout
from parallel.ranks import Ranks
from parallel.schedules import schedule_name, stages_per_rank
from start import last_step

Say = Callable[[str], None]


def announce_start(
    config: Config, shape: ModelConfig, layout: Layout, ranks: Ranks, saved: int | None, attempt: int, say: Say
) -> None:  # fmt: skip
    """What begins, where, on how many processes, and how long it is.

    Args:
        shape: the model, with the data's vocabulary.
        saved: step of the checkpoint that the run goes on from; None: there is none.
        attempt: how many times this run has been started.
        say: prints a line.
    """
    train, checkpoint, sizes = config.train, config.checkpoint, ramp_of(config).sizes
    say(f"run {run_name(config)} in {run_directory(config)}, attempt {attempt}")
    say(
        f"steps {(saved or 0) + 1} to {last_step(config)} of {total_steps(config)}, "
        f"{', then '.join(f'{size * train.seq_len:,}' for size in sizes)} tokens each; "
        f"a checkpoint every {checkpoint.every or last_step(config)} steps; W&B {config.metrics.wandb}"
    )
    say(
        f"a step is {', then '.join(str(size // (train.micro_batch * layout.dp)) for size in sizes)} micro-batches of "
        f"{train.micro_batch} sequences" + (f" on each of {layout.dp} ranks" if layout.dp > 1 else "")
    )
    for sentence in layout_dependent(config):
        say(f"warning: {sentence}")
    if attempt > 1 and saved is None:
        say("no checkpoint was saved by the attempts before: beginning at the first step")
    if ranks.world > 1:
        _announce_layout(config, shape, layout, ranks, say)


def _announce_layout(config: Config, shape: ModelConfig, layout: Layout, ranks: Ranks, say: Say) -> None:
    """The ranks as a table, and what they share."""
    parallel = config.parallel
    say(f"{ranks.world} processes started by {ranks.source}: {layout.words}; zero {parallel.zero}")
    for line in layout.table():
        say(line)
    if parallel.pp > 1:
        layers = ", ".join(str(count) for count in layers_of_stages(shape, parallel))
        source = "as configured" if parallel.layers_per_stage else "even in cost, the head counted"
        say(
            f"pipeline: {schedule_name(parallel)}, {stages_per_rank(parallel)} stage(s) a rank, "
            f"layers {layers} ({source})"
        )


def announce_schedule(config: Config, peak_lr: float, say: Say) -> None:
    """The learning rate and where it comes from."""
    warmup = warmup_steps(config.lr_schedule, total_steps(config))
    source = "optim.lr" if config.optim.lr is not None else "0.75 / model.hidden"
    say(f"learning rate: {peak_lr:.2e} ({source}), {config.lr_schedule.name} after a warm-up of {warmup} steps")
    if config.train.compile:
        say("compile: each block and the loss, once a shape; the first step is slow")


def announce_slow_experts(config: Config, machine: Machine, say: Say) -> None:
    """Warn where experts take turns though the device could have them all at once."""
    if config.model.moe is not None and machine.device.type == "cuda" and machine.compute_dtype != torch.bfloat16:
        say(
            f"warning: experts take turns, slowly: precision={config.precision.name}, and grouped products are bf16's "
            "alone; precision=bf16 has them"
        )


def announce_products(products: Choice, machine: Machine, before: str | None, say: Say) -> None:
    """Who makes FP8's products; before: who made them in the checkpoint that the run goes on from, if any did."""
    words = f"FP8 products: {products.value} ({products.reason})"
    if before not in (None, products.value):
        words += f"; warning: {before} made them so far, whose sums are rounded otherwise"
    say(f"warning: {words}" if machine.device.type == "cuda" and products.value == "emulate" else words)
