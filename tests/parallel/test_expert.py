"""Tokens find their experts and come back: each pair once, on one rank or several, however uneven."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from launch.spawn import run_ranks
from parallel.expert import dispatch, sort_pairs
from parallel.mesh import ALONE, Axis
from parallel.process import joined

EXPERTS, TOP_K, WIDTH = 8, 3, 5
WAYS = ("random", "two experts", "none here", "dropped")


def choices(way, rank, tokens):
    """Experts [T, k] and kept [T, k] or None of one rank."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if way == "two experts":
        scores[:, 1:3] += 1
    if way == "none here":  # the last ranks' experts get nothing
        scores[:, :4] += 1
    kept = torch.rand(tokens, TOP_K, generator=generator) > 0.4 if way == "dropped" else None
    return scores.topk(TOP_K).indices, kept


def routed(way, rank, axis, tokens):
    """Through experts of which number e multiplies by e + 1; beside it the formula."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(tokens, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    probe = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator)
    experts, kept = choices(way, rank, tokens)
    sent = dispatch(x, weights, sort_pairs(experts, kept, EXPERTS), axis)
    rows, row_weights, counts = sent.arrived()
    assert len(rows) == len(row_weights) == int(counts.sum()) and len(counts) == EXPERTS // axis.size
    first = axis.rank * len(counts)
    factor = torch.arange(first, first + len(counts)).repeat_interleave(counts) + 1.0
    out = sent.collect(rows * (factor * row_weights)[:, None])
    own = torch.autograd.grad((out * probe).sum(), (x, weights))
    share = weights if kept is None else weights * kept
    plain = (share * (experts + 1)).sum(1, keepdim=True) * x
    formula = torch.autograd.grad((plain * probe).sum(), (x, weights))
    return [(a - b).abs().max().item() for a, b in zip((out, *own), (plain, *formula), strict=True)]


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_serves_all_experts(way):
    assert max(routed(way, 0, ALONE, 40)) < 1e-13


def on_ranks(ranks, way):
    with joined(ranks, torch.device("cpu"), 60):
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        return routed(way, ranks.rank, axis, 20 + 7 * ranks.rank)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_serve_each_other(world, way):
    assert max(max(errors) for errors in run_ranks(on_ranks, world, way)) < 1e-13


@given(st.integers(1, 50), st.integers(1, 12), st.integers(0, 10_000), st.booleans())
def test_pairs_are_sorted_and_complete(tokens, count, seed, some_dropped):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, count, generator=generator).topk(min(3, count)).indices
    kept = torch.rand(experts.shape, generator=generator) > 0.5 if some_dropped else None
    pairs = sort_pairs(experts, kept, count)
    flat = experts.flatten()[pairs.order]
    assert torch.equal(flat, flat.sort(stable=True).values)
    wanted = experts.flatten() if kept is None else experts[kept]
    assert torch.equal(pairs.counts, wanted.bincount(minlength=count))
    there = torch.ones_like(experts, dtype=torch.bool) if kept is None else kept
    assert torch.equal(pairs.place[there].sort().values, torch.arange(len(pairs.order)))
    assert (pairs.place[~there] == len(pairs.order)).all()
