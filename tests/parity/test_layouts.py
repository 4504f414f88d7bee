"""Every layout computes the training of one process: loss, norm, each parameter's gradient, at every step."""

import pytest

from launch.tolerance import TOLERANCES
from launch.trial import run_trial
from launch.verify import compare
from tests.parity.cases import LAYOUTS, STEPS, config_of


def check(reference, corpus, config, ranks):
    tolerance = TOLERANCES[config.precision.name]
    other = run_trial(config, corpus, ranks, STEPS, tolerance.steps)
    comparison = compare(reference(config), other, tolerance)
    assert comparison.faults == []
    assert len(comparison.steps) == STEPS


@pytest.mark.parametrize("ranks, parallel, model, recompute", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_computes_the_same_training_in_fp64(reference, trial_corpus, ranks, parallel, model, recompute):
    check(reference, trial_corpus, config_of(parallel, ranks, model, "fp64", recompute), ranks)
