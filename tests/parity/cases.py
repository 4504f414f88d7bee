"""Layouts that must compute the same training, and the small model that they compute it on."""

from dataclasses import replace

import pytest

from conf.schema import Config, TrainConfig
from data.config import DataConfig
from launch.tolerance import TOLERANCES
from launch.trial import run_trial
from launch.verify import compare
from model.config import ModelConfig, MoEConfig
from optim.config import OptimConfig, ScheduleConfig
from parallel.config import ParallelConfig
from parallel.precision import PrecisionConfig

STEPS, ALL_STEPS = 8, 20
"""Of `make test`; and of `make soak`, which has all layouts."""
GLOBAL_BATCH = 8
# ffn / tp and the vocabulary's 252 rows do not divide by 8: some ranks hold fewer rows than others, or none.
MODEL = ModelConfig(
    hidden=32, layers=4, heads=8, kv_heads=4, ffn=44, vocab_size=250, vocab_multiple=4, qk_norm=True,
    loss_chunk=17, z_loss=1e-3,
)  # fmt: skip
TIED = replace(MODEL, tied_embeddings=True, bias=True, activation="gelu", qk_norm=False)
"""Two more faces of the model: a table used twice, and a bias in every linear."""
MOE = replace(
    MODEL,
    moe=MoEConfig(
        experts=8, top_k=2, ffn=24, shared_ffn=16, first_dense=1, score="sigmoid", balance="bias", bias_rate=1e-2,
        aux_coefficient=1e-2, z_loss=1e-3, scale=1.5,
    ),
)  # fmt: skip
"""Experts in all but the first block, their loads evened out by biases and by a loss."""
GROUPED = replace(
    MODEL, moe=MoEConfig(experts=8, top_k=3, ffn=16, every=2, groups=4, groups_chosen=2, balance="sequence",
                         aux_coefficient=0.1, renormalize=False),
)  # fmt: skip
"""Another face of them: softmax scores, in two of four groups, in every other block."""


def config_of(parallel, ranks, model=MODEL, precision="fp64", recompute="none", steps=STEPS):
    """The small training, cut as asked, in as few micro-batches as show everything."""
    dp = ranks // (parallel.tp * parallel.pp * parallel.cp)
    micro_batches = min(2 * parallel.pp, GLOBAL_BATCH // dp)
    train = TrainConfig(
        steps=steps, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH // (dp * micro_batches), seq_len=24,
        recompute=recompute, threads=1, device="cpu",
    )  # fmt: skip
    return Config(
        train=train, model=model, data=DataConfig(document_mask=True), precision=PrecisionConfig(precision),
        optim=OptimConfig(lr=3e-3), lr_schedule=ScheduleConfig(name="cosine", warmup=2), parallel=parallel,
    )  # fmt: skip


def pipe(schedule, **others):
    return ParallelConfig(pp=2, schedule=schedule, **others)


P = ParallelConfig
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")
# name: (ranks, cut, model, recompute)
LAYOUTS = {
    "dp2": (2, P(), MODEL, "none"),
    "dp4": (4, P(), MODEL, "none"),
    "tp2": (2, P(tp=2), MODEL, "none"),
    "tp4": (4, P(tp=4), MODEL, "none"),
    "tp4 tied": (4, P(tp=4), TIED, "none"),
    "pp2": (2, P(pp=2), MODEL, "none"),
    "pp4": (4, P(pp=4), MODEL, "none"),
    "pp2 vpp2": (2, P(pp=2, vpp=2), MODEL, "none"),
    "pp2 uneven": (2, P(pp=2, layers_per_stage=(3, 1)), MODEL, "none"),
    **{f"zero{zero} dp{dp}": (dp, P(zero=zero), MODEL, "none") for zero in (0, 1, 2, 3) for dp in (2, 4)},
    "zero3 dp8": (8, P(zero=3), MODEL, "none"),
    "hsdp 2x2 zero1": (4, P(replicate=2, zero=1), MODEL, "none"),
    "hsdp 2x2 zero2": (4, P(replicate=2, zero=2), MODEL, "none"),
    "hsdp 2x2 zero3": (4, P(replicate=2, zero=3), MODEL, "full"),
    "tp2 pp2": (4, P(tp=2, pp=2), MODEL, "none"),
    "tp2 pp2 tied": (4, P(tp=2, pp=2), TIED, "none"),
    **{f"tp2 dp2 zero{zero}": (4, P(tp=2, zero=zero), TIED, "none") for zero in (1, 2, 3)},
    **{f"pp2 dp2 zero{zero}": (4, P(pp=2, zero=zero), TIED, "none") for zero in (1, 2, 3)},
    "tp2 pp2 dp2": (8, P(tp=2, pp=2), MODEL, "none"),
    "tp2 pp2 dp2 zero3 zbv": (8, pipe("zbv", tp=2, zero=3), TIED, "full"),
    "pp4 tied": (4, P(pp=4), TIED, "none"),
    "pp2 zbv tied": (2, pipe("zbv"), TIED, "none"),
    **{f"pp2 {name}": (2, pipe(name), MODEL, "none") for name in SCHEDULES},
    **{
        f"pp2 dp2 {name} zero{zero}": (4, pipe(name, zero=zero), MODEL, "full" if zero == 3 else "none")
        for name in SCHEDULES
        for zero in (1, 2, 3)
        if (name, zero) != ("1f1b", 1)
    },
    "pp2 hsdp 2x2 interleaved_zb zero2": (8, pipe("interleaved_zb", replicate=2, zero=2), MODEL, "none"),
    "recompute selective tp2": (2, P(tp=2), MODEL, "selective"),
    "recompute full dp2 zero3": (2, P(zero=3), MODEL, "full"),
    "recompute every_n pp2": (2, P(pp=2), MODEL, "every_n"),
    "recompute selective pp2 zbv": (2, pipe("zbv"), MODEL, "selective"),
}

QUICK = {
    "tp4 tied", "pp4 tied", "zero0 dp2", "zero3 dp4", "hsdp 2x2 zero2", "tp2 dp2 zero3",
    "pp2 dp2 zero1", "pp2 dp2 interleaved_zb zero3", "pp2 dp2 zbv zero2", "pp2 gpipe", "pp2 zbv tied", "pp2 uneven",
    "tp2 pp2 dp2", "recompute selective pp2 zbv",
}  # fmt: skip
"""What `make test` proves in a few steps; `make soak` proves all of them in more."""


def cases(layouts, quick, steps=STEPS):
    """Parameters of a test, its number of steps last: the quick ones with `steps`, all with `ALL_STEPS` in a soak."""
    words = {name: name if isinstance(name, str) else " ".join(name) for name in layouts}
    return [
        *(pytest.param(*layouts[name], steps, id=words[name]) for name in layouts if name in quick),
        *(
            pytest.param(*layouts[name], ALL_STEPS, id=f"{words[name]}, {ALL_STEPS} steps", marks=pytest.mark.soak)
            for name in layouts
        ),
    ]


def check(reference, corpus, config, ranks):
    """A configuration on so many ranks against one process, within the published tolerance."""
    tolerance = TOLERANCES[config.precision.name]
    other = run_trial(config, corpus, ranks, config.train.steps, tolerance.steps)
    comparison = compare(reference(config), other, tolerance)
    assert comparison.faults == [], comparison.faults
    assert len(comparison.steps) == config.train.steps
