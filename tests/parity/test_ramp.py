"""A batch that grows computes the same training in every layout, each size of a step under its own schedule."""

from dataclasses import replace

import pytest

from data.config import RampConfig
from launch.tolerance import TOLERANCES
from launch.trial import run_trial
from launch.verify import alone, compare
from parallel.config import ParallelConfig
from tests.parity.cases import MODEL, MOE, config_of, pipe

RAMP = (RampConfig(tokens=3 * 2 * 24, global_batch=2), RampConfig(tokens=4 * 4 * 24, global_batch=4))
"""Three steps of two samples, four of four, then eight."""
STEPS = 10


@pytest.mark.parametrize(
    "ranks, parallel, model",
    [
        (4, pipe("zbv", zero=2), MODEL), (2, pipe("interleaved", vpp=2), MOE),
        pytest.param(2, ParallelConfig(), MODEL, marks=pytest.mark.soak),
        pytest.param(2, pipe("1f1b"), MODEL, marks=pytest.mark.soak),
        pytest.param(4, pipe("interleaved_zb", zero=3), MODEL, marks=pytest.mark.soak),
        pytest.param(2, pipe("gpipe"), MODEL, marks=pytest.mark.soak),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)  # fmt: skip
def test_a_growing_batch_is_the_same_training_in_fp64(trial_corpus, ranks, parallel, model):
    config = config_of(parallel, ranks, model, "fp64", steps=STEPS)
    config = replace(config, train=replace(config.train, batch_ramp=RAMP, micro_batch=1))
    tolerance = TOLERANCES["fp64"]
    one, other = (
        run_trial(each, trial_corpus, count, STEPS, tolerance.steps)
        for each, count in ((alone(config), 1), (config, ranks))
    )
    assert compare(one, other, tolerance).faults == []
    plain = replace(config, train=replace(config.train, batch_ramp=()))
    assert run_trial(alone(plain), trial_corpus, 1, 1, 0).losses[0] != one.losses[0]  # the ramp is there
