"""Ranks that hold the same weights hold the same bits, in every layout; one that differs in a bit is named."""

import random

import pytest
import torch

from launch.spawn import run_ranks
from launch.trial import trial_steps
from parallel.config import ParallelConfig
from parallel.replicas import check_replicas
from tests.parity.cases import MODEL, MOE, TIED, config_of, pipe
from tests.parity.counting import started

P = ParallelConfig
LAYOUTS = {
    "dp4 zero0": (4, P(zero=0), MODEL),
    "dp4 replicate2": (4, P(zero=3, replicate=2), MODEL),
    "tp2": (2, P(tp=2), MODEL),
    "cp2": (2, P(cp=2, zero=0), MODEL),
    "pp2 tied": (2, pipe("1f1b"), TIED),
    "ep2": (2, P(ep=2, zero=0), MOE),
    "tp2 dp2": (4, P(tp=2, zero=0), MODEL),
}
STEPS = 3


def flipped(ranks, layout, corpus):
    """What is found after some steps; and, with the weight's name, after a bit of one rank's copy has flipped."""
    _, parallel, model = LAYOUTS[layout]
    config, rng = config_of(parallel, ranks.world, model, "fp32", "none"), random.Random(0)
    with started(ranks, config) as (engine, mesh, everyone):
        for batch in trial_steps(config, corpus, STEPS, mesh.dp_rank, mesh.layout.dp):
            engine.step(batch.micro_batches, engine.agree(everyone, batch, stops=False).valid_tokens, 1e-3)
        clean = check_replicas(engine.updater.tensors(), everyone)
        held = [each for each in engine.updater.tensors() if each[2].copies > 1 and each[1].numel()]
        name, tensor, shard = rng.choice(held)
        if everyone.rank == ranks.world - 1:
            bits = tensor.detach().view(-1).view(torch.int32)
            bits[rng.randrange(len(bits))] ^= 1
        return clean, name, shard.copies, check_replicas(engine.updater.tensors(), everyone)


QUICK = {"dp4 replicate2", "pp2 tied", "ep2", "tp2 dp2"}


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in QUICK else pytest.mark.soak) for each in LAYOUTS]
)
def test_a_bit_that_flips_on_one_rank_is_found_and_nothing_where_none_does(trial_corpus, layout):
    world = LAYOUTS[layout][0]
    outcomes = run_ranks(flipped, world, layout, trial_corpus)
    assert all(not clean for clean, *_ in outcomes)
    _, name, copies, _ = outcomes[-1]
    for _, _, _, found in outcomes:
        (difference,) = found
        assert difference.name == name
        assert world - 1 in difference.ranks
        assert difference.ranks == (world - 1,) or (copies == 2 and len(difference.ranks) == 2)
