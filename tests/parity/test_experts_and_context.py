"""Experts and context parallelism, alone and with everything else: the training of one process."""

import pytest

from parallel.config import ParallelConfig as P
from tests.parity.cases import GROUPED, MODEL, MOE, TIED, cases, check, config_of, pipe


def gathered(**sizes):
    return P(cp_exchange="all_gather", **sizes)


LAYOUTS = {
    "ep2": (2, P(ep=2), MOE, "none"),
    "ep4": (4, P(ep=4), MOE, "none"),
    "ep2 grouped": (2, P(ep=2), GROUPED, "none"),
    "ep1 dp2": (2, P(), MOE, "none"),
    "ep1 tp2": (2, P(tp=2), MOE, "none"),
    "ep2 dp2": (4, P(ep=2), MOE, "none"),
    "ep2 dp2 zero3 full": (4, P(ep=2, zero=3), MOE, "full"),
    "ep2 dp4 zero2": (4, P(ep=2, zero=2), GROUPED, "none"),
    "ep2 dp4 zero0": (4, P(ep=2, zero=0), MOE, "none"),
    "ep2 hsdp 2x2": (4, P(ep=2, replicate=2), MOE, "none"),
    "ep2 tp2": (2, P(ep=2, tp=2), MOE, "none"),
    "ep2 tp2 dp2": (4, P(ep=2, tp=2), GROUPED, "every_n"),
    "ep2 pp2": (4, P(ep=2, pp=2), MOE, "none"),
    "ep2 pp2 interleaved_zb zero3": (4, pipe("interleaved_zb", ep=2, zero=3), MOE, "full"),
    "ep2 pp2 zbv zero2": (8, pipe("zbv", ep=2, zero=2), MOE, "none"),
    "pp2 moe": (2, P(pp=2), GROUPED, "selective"),
    "ep4 over tp2 dp2": (4, P(ep=4, tp=2), MOE, "none"),
    "cp2 ring": (2, P(cp=2), MODEL, "none"),
    "cp2 gather": (2, gathered(cp=2), MODEL, "none"),
    "cp4 ring": (4, P(cp=4), TIED, "none"),
    "cp4 gather": (4, gathered(cp=4), MODEL, "none"),
    "cp2 tp2 ring": (4, P(cp=2, tp=2), MODEL, "selective"),
    "cp2 tp2 gather": (4, gathered(cp=2, tp=2), MODEL, "none"),
    "cp2 pp2 ring": (4, P(cp=2, pp=2), TIED, "full"),
    "cp2 pp2 gather": (4, gathered(cp=2, pp=2), MODEL, "none"),
    "cp2 pp2 zbv": (4, pipe("zbv", cp=2), MODEL, "none"),
    "cp2 dp2 zero0": (4, P(cp=2, zero=0), MODEL, "none"),
    "cp2 dp2 zero1": (4, P(cp=2, zero=1), MODEL, "none"),
    "cp2 dp2 zero3": (4, P(cp=2, zero=3), MODEL, "full"),
    "cp2 hsdp": (4, P(cp=2, replicate=2), MODEL, "none"),
    "cp2 ep2": (2, P(cp=2, ep=2), MOE, "none"),
    "cp2 ep2 gather": (4, gathered(cp=2, ep=2), GROUPED, "none"),
    "pp2 cp2 tp2 ep2": (8, P(pp=2, cp=2, tp=2, ep=2), MOE, "none"),
    "pp2 dp2 tp2 ep4": (8, P(pp=2, tp=2, ep=4), MOE, "none"),
}
QUICK = {
    "ep2 dp2 zero3 full", "ep2 pp2 interleaved_zb zero3", "ep4 over tp2 dp2", "cp2 gather",
    "cp4 ring", "cp2 tp2 ring", "pp2 cp2 tp2 ep2",
}  # fmt: skip


@pytest.mark.parametrize("ranks, parallel, model, recompute, steps", cases(LAYOUTS, QUICK))
def test_a_layout_computes_the_same_training_in_fp64(reference, trial_corpus, ranks, parallel, model, recompute, steps):
    check(reference, trial_corpus, config_of(parallel, ranks, model, "fp64", recompute, steps), ranks)


ROUNDED = {"ep2 dp2", "ep2 tp2", "ep2 pp2", "cp2 ring", "cp4 gather", "cp2 tp2 ring", "cp2 ep2", "pp2 cp2 tp2 ep2"}


@pytest.mark.parametrize(
    "ranks, parallel, model, recompute, steps",
    cases({name: LAYOUTS[name] for name in sorted(ROUNDED)}, {"ep2 tp2"}),
)
def test_a_layout_stays_within_the_tolerance_in_fp32(reference, trial_corpus, ranks, parallel, model, recompute, steps):
    check(reference, trial_corpus, config_of(parallel, ranks, model, "fp32", recompute, steps), ranks)
