"""What verify is for: each of the field's silent faults, made on purpose in the ranks, is found and named."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import engine
from launch.spawn import run_ranks
from launch.tolerance import TOLERANCES
from launch.trial import RanksDiffer, assemble, rank_trial
from launch.verify import compare
from optim.updater import Updater
from parallel.config import ParallelConfig
from parallel.gradients import finish_gradients
from tests.parity.cases import MODEL, TIED, config_of

STEPS = 2
Engine = engine.Engine
begin, agree, finish, updater = Engine._begin, Engine.agree, finish_gradients, Updater.__init__


def nothing(*_):
    pass


def averaged_over_micro_batches(self, batches, scale, *rest):
    begin(self, batches, scale / len(batches), *rest)


def counted_on_one_rank(self, everyone, batch, stops):
    return replace(agree(self, everyone, batch, stops), valid_tokens=batch.valid_tokens * self.mesh.layout.dp)


def averaged_over_dp(shards, mesh, table):
    torch._foreach_div_([s.gradient for s in shards], mesh.layout.dp)
    finish(shards, mesh, table)


def counting_copies(self, shards, *rest, **named):
    updater(self, [replace(each, copies=1) for each in shards], *rest, **named)


FAULTS = {
    "norm gradient sum over tp": ("parallel.gradients.add_up", nothing, ParallelConfig(tp=2), MODEL, "norm.weight"),
    "loss scale under pp": (
        "engine.Engine._begin", averaged_over_micro_batches, ParallelConfig(pp=2), MODEL, "norm differs",
    ),
    "tied gradient": ("parallel.gradients._share", nothing, ParallelConfig(pp=2), TIED, "embedding.weight"),
    "token count over dp": ("engine.Engine.agree", counted_on_one_rank, ParallelConfig(), MODEL, "loss"),
    "mean over dp": ("engine.finish_gradients", averaged_over_dp, ParallelConfig(), MODEL, "norm differs"),
    "copies in the norm": (
        "optim.updater.Updater.__init__", counting_copies, ParallelConfig(tp=2), MODEL, "gradient norm",
    ),
}  # fmt: skip


def broken_trial(ranks, where, fault, *args):
    """`rank_trial` with one function replaced, in this rank alone."""
    with patch(where, FAULTS[fault][1]):
        return rank_trial(ranks, *args)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(reference, trial_corpus, fault):
    where, _, parallel, model, words = FAULTS[fault]
    config = config_of(parallel, 2, model, steps=STEPS)
    try:
        other = assemble(run_ranks(broken_trial, 2, where, fault, config, trial_corpus, STEPS, None))
    except RanksDiffer as error:  # not even the ranks agree
        assert "saw other losses or norms" in str(error)
        return
    faults = compare(reference(config), other, TOLERANCES["fp64"]).faults
    assert any(words in each for each in faults), faults
