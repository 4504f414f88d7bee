"""What ranks hold, move and do equals what the formulas say."""

from dataclasses import replace

import pytest

from launch.spawn import run_ranks
from parallel.action_lists import action_lists
from parallel.config import ParallelConfig
from parallel.schedules import SCHEDULES, stages_per_rank
from tests.parity.cases import GLOBAL_BATCH, MODEL, config_of
from tests.parity.counting import one_step, saved_for_backward, within

BYTES = {"fp32": 4, "bf16": 2}


def with_micro_batch(config, size):
    return replace(config, train=replace(config.train, micro_batch=size))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_held_and_moved_are_those_of_the_formulas(trial_corpus, zero, precision):
    """FSDP2's lines: 16/N sharded; (c+4)N, (c+4m)N or (2c+4)mN moved, beside the rows that fill up."""
    m, ranks, c = 4, 2, BYTES[precision]
    config = with_micro_batch(config_of(ParallelConfig(zero=zero), ranks, MODEL, precision), 1)
    counted = run_ranks(one_step, ranks, config, trial_corpus)
    whole, padded = counted[0].whole, counted[0].padded
    assert padded < 1.01 * whole
    for kind in ("parameters", "gradients", "moments"):
        held = sum(getattr(each, kind) for each in counted)
        assert held == whole * (8 if kind == "moments" else 4)
    for each in counted:
        assert each.parameters + each.gradients + each.moments == pytest.approx(16 * whole / ranks, rel=0.01)
        gathers = {1: 1, 2: 1, 3: 2 * m}[zero]
        reductions = {1: 1, 2: m, 3: m}[zero]
        assert each.gathered == c * gathers * padded
        assert each.reduced == 4 * reductions * padded
        assert each.reductions == reductions * each.groups


@pytest.mark.parametrize("zero, weights, gradients", [(1, True, True), (2, True, False), (3, False, False)])
def test_what_is_held_whole_within_a_step(trial_corpus, zero, weights, gradients):
    config = with_micro_batch(config_of(ParallelConfig(zero=zero), 2, MODEL, "bf16"), 1)
    for each in run_ranks(within, 2, config, trial_corpus):
        assert each.unsharded == pytest.approx(2 * each.whole if weights else 0, rel=0.01)
        assert each.accumulated == (4 * each.whole if gradients else 0)


def test_tp_sequence_parallel_divides_activations_and_recomputation_drops_them(trial_corpus):
    def kept(parallel, ranks, recompute="none"):
        config = with_micro_batch(config_of(parallel, ranks, MODEL, "fp32", recompute), GLOBAL_BATCH)
        return run_ranks(saved_for_backward, ranks, config, trial_corpus)[0]

    whole = kept(ParallelConfig(), 1)
    two, four = kept(ParallelConfig(tp=2), 2), kept(ParallelConfig(tp=4), 4)
    assert two < 0.7 * whole and four < 0.55 * whole, (whole, two, four)
    selective, half, full = (kept(ParallelConfig(), 1, mode) for mode in ("selective", "every_n", "full"))
    assert full < half < whole and full < selective < whole
    assert full < 0.3 * whole


CASES = [(name, zero) for name in SCHEDULES for zero in (1, 2, 3)]


@pytest.mark.parametrize("schedule, zero", CASES)
def test_a_schedule_does_each_thing_once_in_its_own_order(trial_corpus, schedule, zero):
    """One recomputation a block; reductions as often as the ZeRO stage says; the order of the action lists."""
    parallel = ParallelConfig(pp=2, schedule=schedule, zero=zero)
    config = config_of(parallel, 4, MODEL, "fp32", recompute="full")
    m = GLOBAL_BATCH // (config.train.micro_batch * 2)
    expected = action_lists(schedule, 2, stages_per_rank(parallel), m)
    for rank, each in enumerate(run_ranks(one_step, 4, config, trial_corpus)):
        planned = [(a.kind, a.stage, a.micro_batch) for a in expected[rank // 2]]
        assert each.order == planned
        assert each.bodies == 2 * m * MODEL.layers // 2
        most = each.groups * (1 if zero == 1 else m)
        # A group of no linears (embedding, norm, head) has nothing to send where its gradient came before.
        bare = sum(1 for stage in {stage for _, stage, _ in planned}) if SCHEDULES[schedule].splits and zero > 1 else 0
        assert most - bare * m <= each.reductions <= most
