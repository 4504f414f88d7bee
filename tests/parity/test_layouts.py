"""Every layout computes the training of one process: loss, norm, each parameter's gradient, at every step."""

from dataclasses import replace

import pytest

from launch.tolerance import TOLERANCES
from launch.trial import run_trial
from launch.verify import compare
from tests.parity.cases import LAYOUTS, MODEL, QUICK, STEPS, cases, config_of, pipe


def check(reference, corpus, config, ranks):
    tolerance = TOLERANCES[config.precision.name]
    other = run_trial(config, corpus, ranks, STEPS, tolerance.steps)
    comparison = compare(reference(config), other, tolerance)
    assert comparison.faults == []
    assert len(comparison.steps) == STEPS


@pytest.mark.parametrize("ranks, parallel, model, recompute", cases(LAYOUTS, QUICK))
def test_a_layout_computes_the_same_training_in_fp64(reference, trial_corpus, ranks, parallel, model, recompute):
    check(reference, trial_corpus, config_of(parallel, ranks, model, "fp64", recompute), ranks)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_one_micro_batch_a_rank_suits_a_schedule_that_splits_its_backward(reference, trial_corpus, precision):
    config = config_of(pipe("interleaved_zb"), 4, MODEL, precision)
    config = replace(config, train=replace(config.train, micro_batch=4))
    check(reference, trial_corpus, config, 4)
