"""The scales that each rank ends with, after some steps in FP8; runs in spawned ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conf.schema import Config
from launch.trial import trial_steps
from parallel.fp8.state import slots_of
from parallel.precision import PrecisionConfig, PrecisionName
from parallel.ranks import Ranks
from tests.parity.cases import MODEL, MOE, config_of
from tests.parity.counting import started

MICRO_BATCHES, BATCH = 4, 16
WIDE = replace(MODEL, hidden=64, ffn=96)
assert MOE.moe is not None
EXPERTS = replace(MOE, hidden=64, ffn=96, moe=replace(MOE.moe, ffn=32, shared_ffn=32))
Scales = dict[tuple[str, int], tuple[list[float], list[float]]]
"""Name and first expert of this rank -> its scales and history."""


def fp8_config(parallel, ranks, model=WIDE, name: PrecisionName = "fp8_delayed", recompute="none", **fp8) -> Config:
    """The small training with as many micro-batches on each rank in every layout: scales depend on them."""
    base = config_of(parallel, ranks, model, "fp32", recompute)
    precision = PrecisionConfig(name)
    dp = ranks // (parallel.tp * parallel.pp * parallel.cp)
    size = BATCH // (dp * MICRO_BATCHES)
    config: Config = replace(
        base, train=replace(base.train, micro_batch=size, global_batch=BATCH),
        precision=replace(precision, fp8=replace(precision.fp8, **({"history": 4} | fp8))),
    )  # fmt: skip
    return config


def scales_after(
    ranks: Ranks, config: Config, corpus: Path, steps: int, breaking: Callable[[], None] | None = None
) -> tuple[list[float], Scales]:
    """Losses, and what each linear's table holds at the end."""
    if breaking is not None:
        breaking()
    with started(ranks, config, exact=True) as (engine, mesh, everyone):
        losses, found = [], {}
        for batch in trial_steps(config, corpus, steps, mesh.dp_rank, mesh.layout.dp):
            agreed = engine.agree(everyone, batch, stops=False)
            sums, _ = engine.step(batch.micro_batches, agreed.valid_tokens, 3e-3)
            losses.append(engine.everywhere(sums)[0] / agreed.valid_tokens)
        for built in engine.parts:
            for name, slot in slots_of(built.decoder):
                state = slot.state()
                first = mesh.axis("ep").rank * slot.count if slot.expert else 0
                found[name, first] = state["scale"].flatten().tolist(), state["history"].flatten().tolist()
        everyone.barrier()
    return losses, found
