"""Routing: how many pairs, which experts, what weights, and what the losses do, each against a formula of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.spawn import run_ranks
from model.config import ModelConfig, MoEConfig
from model.context import BlockContext
from model.router import Router, best, choose
from parallel.cuts import Cuts
from parallel.mesh import Axis
from parallel.process import joined

HIDDEN, EXPERTS = 12, 8


def made(cuts=None, dtype=torch.float64, **changes):
    chosen: dict[str, Any] = {"experts": EXPERTS, "top_k": 3, "balance": "none"} | changes
    moe = MoEConfig(**chosen)
    router = Router(ModelConfig(hidden=HIDDEN, moe=moe), cuts or Cuts()).to(dtype)
    router.reset_buffers()
    with torch.no_grad():
        router.weight.copy_(torch.randn(moe.experts, HIDDEN, generator=torch.Generator().manual_seed(1)))
    return router


def tokens_of(count, dtype=torch.float64, seed=2):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def context(seq_len, share=1.0):
    attention: Any = None  # of which the router needs nothing
    return BlockContext(attention, seq_len, share)


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["softmax", "sigmoid"]), st.booleans())


@given(SHAPES, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.floats(0.1, 3))
@settings(max_examples=40, deadline=None)
def test_without_a_capacity_each_token_has_k_different_experts(shape, dtype, scale):
    count, top_k, score, renormalize = shape
    router = made(dtype=dtype, top_k=top_k, score=score, renormalize=renormalize, scale=scale)
    experts, weights, kept = router(tokens_of(count, dtype), context(count))
    assert experts.shape == weights.shape == (count, top_k) and experts.dtype == torch.int64 and kept is None
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    ordered = experts.sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and ordered.min() >= 0 and ordered.max() < EXPERTS
    assert router.tally[:EXPERTS].sum() == count * top_k and router.tally[-1] == 0
    if renormalize:
        torch.testing.assert_close(weights.sum(1), torch.full_like(weights[:, 0], scale))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_the_scores_of_the_best_experts_whatever_the_bias(score):
    router, x = made(score=score, balance="bias", renormalize=False, scale=2.0), tokens_of(50)
    with torch.no_grad():
        router.balance.copy_(torch.linspace(-0.5, 0.5, EXPERTS))
    experts, weights, _ = router(x, context(50))
    logits = x @ router.weight.t()
    scores = logits.softmax(1) if score == "softmax" else 1 / (1 + torch.exp(-logits))
    wanted = (scores + router.balance).topk(3).indices
    assert torch.equal(experts, wanted) and not torch.equal(experts, scores.topk(3).indices)
    torch.testing.assert_close(weights, 2 * scores.gather(1, wanted))


def test_of_equal_experts_the_first_are_chosen_however_many_tokens():
    router = made()
    with torch.no_grad():
        router.weight[1:] = router.weight[0]
    for count in (1, 7, 3000):
        assert (router(tokens_of(count), context(count)).experts == torch.arange(3)).all()
    values = torch.tensor([[0.5, 0.7, 0.5, 0.7], [torch.nan, 1.0, torch.nan, 2.0]])
    assert best(values, 3).tolist() == [[1, 3, 0], [0, 2, 3]]


@given(st.sampled_from([(2, 1), (4, 2), (4, 3), (8, 4)]), st.integers(1, 2), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_experts_are_in_the_best_groups_alone(groups, top_k, seed):
    moe = MoEConfig(experts=16, top_k=top_k, groups=groups[0], groups_chosen=groups[1])
    generator = torch.Generator().manual_seed(seed)
    scores, bias = torch.rand(30, 16, generator=generator), torch.rand(16, generator=generator) / 4
    experts, size = choose(scores, bias, moe), 16 // groups[0]
    for token, row in enumerate((scores + bias).tolist()):
        together = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups[0])]
        open_ = sorted(range(groups[0]), key=lambda g: -together[g])[: groups[1]]
        inside = [e for e in range(16) if e // size in open_]
        assert experts[token].tolist() == sorted(inside, key=lambda e: -row[e])[:top_k]


@given(st.sampled_from([0.5, 1.0, 1.25, 4.0]), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_capacity_drops_exactly_the_lowest_scores_of_full_experts(factor, count, seed):
    router, x = made(capacity_factor=factor), tokens_of(count, seed=seed)
    experts, weights, kept = router(x, context(count))
    scores = (x @ router.weight.t()).softmax(1)
    most = -(-factor * 3 * count // EXPERTS)
    for expert in range(EXPERTS):
        mine = (experts == expert).nonzero().tolist()
        ranked = sorted(mine, key=lambda pair: -scores[pair[0], expert].item())
        assert [kept[tuple(pair)].item() for pair in ranked] == [place < most for place in range(len(ranked))]
    assert router.tally[-1] == (~kept).sum() and router.tally[:EXPERTS].sum() == 3 * count
    torch.testing.assert_close(weights.sum(1), torch.ones_like(weights[:, 0]))


def test_of_equal_scores_the_first_tokens_stay():
    router = made(capacity_factor=1.0, experts=4, top_k=2)
    kept = router(tokens_of(1).expand(8, -1), context(8)).kept
    assert kept.sum(1).tolist() == [2, 2, 2, 2, 0, 0, 0, 0]


def test_biases_move_towards_balance_unless_the_step_is_skipped():
    router, x = made(balance="bias", bias_rate=0.01, score="sigmoid"), tokens_of(400)
    with torch.no_grad():
        x += 1.0  # so that loads are uneven
    violations = []
    for step in range(120):
        router.tally.zero_()
        router(x, context(400))
        loads, before = router.tally[:EXPERTS].clone(), router.balance.clone()
        violations.append((loads.max() / loads.mean() - 1).item())
        router.update_balance(loads, torch.tensor(float(step == 5)))
        direction = torch.zeros(EXPERTS) if step == 5 else torch.sign(loads.mean() - loads)
        torch.testing.assert_close(router.balance - before, 0.01 * direction.double())
    assert violations[0] > 0.5 and violations[-1] < 0.25 * violations[0]


def formula(logits, experts, score, seq_len, share, coefficient, z_loss):
    """Balance and z-loss of [T, E] logits, written out."""
    scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(1, keepdim=True)
    balance = 0.0
    for sequence in range(len(logits) // seq_len):
        rows = slice(sequence * seq_len, (sequence + 1) * seq_len)
        chosen = torch.nn.functional.one_hot(experts[rows], logits.shape[1]).double().sum((0, 1))
        often = chosen / chosen.sum()
        balance += seq_len * (often * shares[rows].mean(0)).sum() * logits.shape[1] * coefficient * share
    return balance, z_loss * share * (logits.exp().sum(1).log() ** 2).sum()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance, coefficient", [("sequence", 0.3), ("batch", 0.3), ("bias", 0.3), ("bias", 0.0)])
def test_losses_and_their_gradients_equal_the_formula(balance, coefficient, score):
    router = made(balance=balance, score=score, aux_coefficient=coefficient, z_loss=0.05)
    x, probe = tokens_of(48), torch.randn(48, 3, dtype=torch.float64)
    routing = router(x, context(16, share=1 / 100))
    (routing.weights * probe).sum().backward()

    other, weight = tokens_of(48), router.weight.detach().clone().requires_grad_()
    logits = other @ weight.t()
    seq_len = 48 if balance == "batch" else 16
    losses = formula(logits, routing.experts, score, seq_len, 1 / 100, coefficient, 0.05)
    scores = (logits.softmax(1) if score == "softmax" else logits.sigmoid()).gather(1, routing.experts)
    ((scores / scores.sum(1, keepdim=True) * probe).sum() + sum(losses)).backward()
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(router.weight.grad, weight.grad)
    torch.testing.assert_close(router.tally[EXPERTS + 1 : EXPERTS + 3], torch.stack([*losses]).detach())


def test_even_loads_cost_the_coefficient_and_uneven_ones_more():
    router = made(balance="sequence", aux_coefficient=1.0, top_k=1, renormalize=False)
    x = torch.eye(EXPERTS, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(20 * torch.eye(EXPERTS, HIDDEN))
    router(x, context(EXPERTS, 1 / EXPERTS))
    assert router.tally[EXPERTS + 1].item() == pytest.approx(1.0)
    router.tally.zero_()
    router(x[:1].expand(EXPERTS, -1), context(EXPERTS, 1 / EXPERTS))
    assert router.tally[EXPERTS + 1].item() == pytest.approx(EXPERTS, rel=1e-6)


def test_lower_sigmoid_scores_all_round_do_not_lower_the_loss():
    router, x = made(balance="sequence", aux_coefficient=1.0, score="sigmoid"), tokens_of(32)
    losses = []
    for shift in (0.0, -6.0, -40.0):
        router.tally.zero_()
        moved = torch.cat([x.detach(), torch.full((32, 1), shift, dtype=torch.float64)], 1)
        wider = made(balance="sequence", aux_coefficient=1.0, score="sigmoid")
        wider.weight = torch.nn.Parameter(torch.cat([router.weight.detach(), torch.ones(EXPERTS, 1)], 1).double())
        wider(moved, context(16, 1 / 32))
        losses.append(wider.tally[EXPERTS + 1].item())
    assert losses[0] <= losses[1] + 1e-3 and losses[1] <= losses[2] + 1e-3, "of E * sum f P, which is near 1 at least"
    assert min(losses) > 0.9


def test_evaluation_leaves_no_trace_and_attaches_nothing():
    router, x = made(balance="sequence", z_loss=0.1), tokens_of(16)
    with torch.no_grad():
        quiet = router(x, context(16))
    assert (router.tally == 0).all()
    loud = router(x, context(16))
    assert torch.equal(quiet.experts, loud.experts) and torch.equal(quiet.weights, loud.weights)
    assert (router.tally != 0).any()


def test_entropy_of_even_scores_is_log_e_a_token():
    router = made()
    with torch.no_grad():
        router.weight.zero_()
    router(tokens_of(10), context(10))
    assert router.tally[EXPERTS].item() == pytest.approx(10 * torch.tensor(float(EXPERTS)).log().item())


def test_logits_are_made_in_fp32_and_buffers_stay_wide():
    router, x = made(dtype=torch.bfloat16, renormalize=False), tokens_of(20, torch.bfloat16)
    weights = router(x, context(20)).weights
    wanted = (x.float() @ router.weight.float().t()).softmax(1).topk(3).values
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)
    weights.square().sum().backward()
    assert x.grad.dtype == router.weight.grad.dtype == torch.bfloat16
    assert router.balance.dtype == torch.float32 and router.tally.dtype == torch.float64
    assert list(router.state_dict()) == ["weight", "balance"]


def test_extreme_logits_give_finite_weights_and_gradients():
    for score in ("softmax", "sigmoid"):
        router, x = made(dtype=torch.float32, score=score, balance="sequence"), tokens_of(10, torch.float32)
        routing = router(x * 1e4, context(10))
        routing.weights.square().sum().backward()
        assert routing.weights.isfinite().all() and x.grad.isfinite().all() and router.weight.grad.isfinite().all()


def split(ranks, tp, cp):
    """Routing of this rank's tokens of two sequences of 16, cut over cp and then tp."""
    with joined(ranks, torch.device("cpu"), 60):
        world = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        cuts = Cuts(tp=world if tp > 1 else Axis(), cp=world if cp > 1 else Axis(), tokens=world)
        router = made(cuts, balance="sequence", aux_coefficient=0.3, z_loss=0.05)
        by_sequence = tokens_of(32).detach().view(2, cp, 16 // cp, HIDDEN)
        own = by_sequence[:, world.rank if cp > 1 else 0].flatten(0, 1)
        own = own.chunk(tp)[world.rank if tp > 1 else 0].clone().requires_grad_()
        router(own, context(16 // cp, 1 / 32)).weights.square().sum().backward()
        gradients = [router.weight.grad, router.tally]
        for each in gradients:
            dist.all_reduce(each)
        return [each.tolist() for each in gradients]


@pytest.mark.parametrize("tp, cp", [(2, 1), (1, 2), (4, 1)])
def test_ranks_that_share_sequences_have_the_losses_of_one(tp, cp):
    router = made(balance="sequence", aux_coefficient=0.3, z_loss=0.05)
    router(tokens_of(32), context(16, 1 / 32)).weights.square().sum().backward()
    for ours in run_ranks(split, tp * cp, tp, cp):
        for a, b in zip(ours, (router.weight.grad, router.tally), strict=True):
            torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b)


def test_a_model_without_experts_has_no_router():
    with pytest.raises(ValueError, match="there are no experts"):
        Router(replace(ModelConfig(), moe=None), Cuts())
