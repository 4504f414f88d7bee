"""A number gone wrong on one rank is found there, in every layout: its module, micro-batch and token, or its weight."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from launch.spawn import run_ranks
from launch.trial import trial_steps
from parallel.config import ParallelConfig
from tests.parity.cases import MODEL, MOE, TIED, config_of, pipe
from tests.parity.counting import started

P = ParallelConfig
LAYOUTS = {
    "one": (1, P(), MODEL, "none"),
    "one full": (1, P(), MODEL, "full"),
    "dp2 zero0": (2, P(zero=0), MODEL, "none"),
    "dp2 zero3 full": (2, P(zero=3), MODEL, "full"),
    "dp2 zero2": (2, P(zero=2), TIED, "none"),
    "tp2": (2, P(tp=2), MODEL, "selective"),
    "tp2 tied": (2, P(tp=2), TIED, "none"),
    "cp2": (2, P(cp=2), MODEL, "none"),
    "cp2 gathered": (2, P(cp=2, cp_exchange="all_gather"), MODEL, "none"),
    "pp2": (2, P(pp=2), MODEL, "none"),
    "pp2 zbv": (2, pipe("zbv"), MODEL, "none"),
    "pp2 interleaved_zb": (2, pipe("interleaved_zb"), MODEL, "full"),
    "pp2 dualpipev": (2, pipe("dualpipev"), MODEL, "none"),
    "ep2": (2, P(ep=2), MOE, "none"),
    "tp2 pp2": (4, P(tp=2, pp=2), MODEL, "none"),
    "tp2 ep2": (2, P(tp=2, ep=2), MOE, "none"),
    "pp2 dp2 ep2 zbv": (4, pipe("zbv", ep=2, zero=3), MOE, "full"),
    "pp2 dp2 zero3": (4, P(pp=2, zero=3), MODEL, "none"),
    "tp2 cp2": (4, P(tp=2, cp=2), MODEL, "none"),
}  # fmt: skip
KINDS = ("output", "gradient", "weight", "weight's gradient")


@dataclass(frozen=True)
class Case:
    """What is to go wrong, drawn by `seed`."""

    layout: str
    kind: str
    seed: int


@dataclass
class Outcome:
    """Of one rank."""

    made: object = None
    """(module, micro-batch, first row) where the fault was made here, or the parameter's name."""
    skipped: float = 0.0
    fault: object = None
    again: object = None
    """What is found once nothing is wrong."""
    same: bool = False
    """Whether the weights are those of before, and no gradient is left."""
    size: tuple[int, ...] = ()
    """Micro-batches, and the layers of this rank."""


def bad_output(engine, rng, made):
    """The output of a block, in one micro-batch."""
    layer, number = rng.choice(sorted(engine.layers)), rng.randrange(engine.micro_batches)
    bad = rng.choice([math.nan, math.inf])
    rows: list[int] = []

    def spoil(module, args, out):
        if engine.micro_batch == number and torch.is_grad_enabled():
            rows.append(rows[0] if rows else rng.randrange(len(out)))
            out.data[rows[-1]] = bad  # unseen by autograd: with another graph FSDP would gather in another order here

    made.append([f"layers.{layer}", number, rows])
    return engine.layers[layer].register_forward_hook(spoil)


def bad_gradient(engine, rng, made):
    """The gradient that the attention of a block gives, in one micro-batch."""
    layer, number = rng.choice(sorted(engine.layers)), rng.randrange(engine.micro_batches)

    def spoil(module, args, out):
        if engine.micro_batch == number and out.requires_grad:
            out.register_hook(lambda gradient: gradient * math.inf)

    made.append([f"layers.{layer}.attention", number, None])
    return engine.layers[layer].attention_norm.register_forward_hook(spoil)


def bad_weight(engine, rng, made):
    """An element of a weight that every token meets."""
    held = [each for each in engine.shards if each.local.numel() and each.local.dim() > 1 and "embed" not in each.name]
    each = rng.choice(held)
    before = each.local.clone()
    each.local.view(-1)[rng.randrange(each.local.numel())] = rng.choice([math.nan, math.inf])
    made.append(each.name)

    class Restore:
        @staticmethod
        def remove():
            each.local.copy_(before)

    return Restore


class Overflowing(torch.autograd.Function):
    """x w^T whose weight's gradient alone overflows."""

    @staticmethod
    def forward(ctx, out, weight):
        ctx.weight = weight
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.weight, math.inf)


def bad_weight_gradient(engine, rng, made):
    """The gradient of one weight, in one micro-batch."""
    layer, number = rng.choice(sorted(engine.layers)), rng.randrange(engine.micro_batches)

    def spoil(module, args, out):
        return Overflowing.apply(out, module.weight) if engine.micro_batch == number else None

    made.append([f"layers.{layer}.mlp_norm.weight", number, None])
    return engine.layers[layer].mlp_norm.register_forward_hook(spoil)


FAULTS = dict(zip(KINDS, (bad_output, bad_gradient, bad_weight, bad_weight_gradient), strict=True))


def spoiled(ranks, cases, corpus):
    """Each case's outcome on this rank; cases of one layout."""
    _, parallel, model, recompute = LAYOUTS[cases[0].layout]
    config = config_of(parallel, ranks.world, model, "fp32", recompute)
    found = []
    with started(ranks, config) as (engine, mesh, everyone):
        (batch,) = trial_steps(config, corpus, 1, mesh.dp_rank, mesh.layout.dp)
        agreed = engine.agree(everyone, batch, stops=False)
        for case in cases:
            found.append(one(engine, everyone, batch, agreed.valid_tokens, case))
    return found


def one(engine, everyone, batch, valid_tokens, case):
    out, rng = Outcome(), random.Random(case.seed)
    rank = rng.randrange(everyone.world)
    made: list[Any] = []
    weights = [each.local.clone() for each in engine.shards]
    handle = FAULTS[case.kind](engine, rng, made) if everyone.rank == rank else None
    engine.updater.publish()
    _, outcome = engine.step(batch.micro_batches, valid_tokens, 1e-3)
    out.skipped = outcome.skipped.item()
    out.fault = engine.locate(batch.micro_batches, valid_tokens, everyone)
    if handle is not None:
        handle.remove()
    engine.updater.publish()
    out.made = made[0] if made else None
    clean = all(each.parameter.grad is None for each in engine.shards)
    out.same = clean and all(torch.equal(w, each.local) for w, each in zip(weights, engine.shards, strict=True))
    out.again = engine.locate(batch.micro_batches, valid_tokens, everyone)
    out.size = (engine.micro_batches, batch.micro_batches[0].samples)
    return out


def check(corpus, cases):
    """All cases are of one layout."""
    outcomes = run_ranks(spoiled, LAYOUTS[cases[0].layout][0], cases, corpus, timeout=120.0 + 30.0 * len(cases))
    for number, case in enumerate(cases):
        check_one(case, [each[number] for each in outcomes])


def check_one(case, outcomes):
    (rank,) = (number for number, each in enumerate(outcomes) if each.made is not None)
    fault, made = outcomes[0].fault, outcomes[rank].made
    assert all(each.skipped == 1.0 and each.same and each.again is None for each in outcomes), case
    assert all(each.fault == fault for each in outcomes), case
    assert fault is not None, case
    if case.kind == "weight":
        assert (fault.passing, fault.parameter, fault.rank) == ("weights", made, rank), (case, fault)
        return
    module, micro_batch, rows = made
    name = fault.parameter if case.kind == "weight's gradient" else fault.module
    exact = name == module or (case.kind == "gradient" and name.startswith(f"{module}."))
    assert exact and (fault.rank, fault.micro_batch) == (rank, micro_batch), (case, fault, made)
    assert fault.passing == ("forward" if case.kind == "output" else "backward")
    if case.kind == "output":
        assert fault.sample in range(*fault.samples) and 0 <= fault.position < 24, (case, fault)
        assert fault.numbers.bad == 32
        if case.layout.startswith(("one", "dp", "ep", "pp")):
            assert divmod(rows[0], 24) == (fault.sample - fault.samples[0], fault.position), (case, fault, rows)


@pytest.mark.parametrize("layout", ["dp2 zero3 full", "cp2", "ep2", "tp2 pp2"])
def test_a_fault_made_on_one_rank_is_named_by_all(trial_corpus, layout):
    check(trial_corpus, [Case(layout, kind, seed) for seed, kind in enumerate(KINDS)])


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_by_twenty_seeds_are_named_in_every_layout(trial_corpus, layout):
    check(trial_corpus, [Case(layout, kind, seed) for seed in range(20) for kind in KINDS])
