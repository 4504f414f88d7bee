"""Every layout computes the training of one process: loss, norm, each parameter's gradient, at every step."""

from dataclasses import replace

import pytest

from tests.parity.cases import LAYOUTS, MODEL, QUICK, cases, check, config_of, pipe


@pytest.mark.parametrize("ranks, parallel, model, recompute, steps", cases(LAYOUTS, QUICK))
def test_a_layout_computes_the_same_training_in_fp64(reference, trial_corpus, ranks, parallel, model, recompute, steps):
    check(reference, trial_corpus, config_of(parallel, ranks, model, "fp64", recompute, steps), ranks)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_one_micro_batch_a_rank_suits_a_schedule_that_splits_its_backward(reference, trial_corpus, precision):
    config = config_of(pipe("interleaved_zb"), 4, MODEL, precision)
    config = replace(config, train=replace(config.train, micro_batch=4))
    check(reference, trial_corpus, config, 4)
