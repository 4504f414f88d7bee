"""Tokens of a sequence over context-parallel ranks: nothing lost, nothing twice, the same work for each."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from launch.spawn import run_ranks
from parallel.context import circulate, gather_sequence, in_order, local_places, local_share, unmasked_pairs
from parallel.mesh import Axis
from parallel.process import joined


@given(cp=st.integers(1, 8), chunk=st.integers(1, 5), rows=st.integers(1, 4), data=st.data())
def test_the_shares_of_all_ranks_are_a_permutation_with_a_way_back(cp, chunk, rows, data):
    seq_len = 2 * cp * chunk
    t = torch.tensor(data.draw(st.lists(st.integers(0, 99), min_size=rows * seq_len, max_size=rows * seq_len)))
    shares = [local_share(t, seq_len, Axis(cp, rank)) for rank in range(cp)]
    places = [local_places(seq_len, Axis(cp, rank)) for rank in range(cp)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(seq_len))
    back = torch.empty(rows, seq_len, dtype=t.dtype)
    for share, at in zip(shares, places, strict=True):
        assert torch.equal(at, at.sort().values)
        back[:, at] = share.view(rows, -1)
    assert torch.equal(back.flatten(), t)
    assert torch.equal(in_order(torch.stack(shares).view(cp, rows, -1), 1).flatten(), t)


def test_a_share_keeps_further_dimensions_and_each_sequences_chunks_together():
    t = torch.arange(32).view(16, 2)  # two sequences of 8 tokens
    assert local_share(t, 8, Axis(2, 1))[:, 0].tolist() == [4, 6, 8, 10, 20, 22, 24, 26]
    assert local_share(t, 8, Axis(2, 0))[:, 0].tolist() == [0, 2, 12, 14, 16, 18, 28, 30]


def test_a_sequence_that_does_not_divide_is_refused_in_words():
    with pytest.raises(ValueError, match="18 tokens cannot be cut into 2 x 4"):
        local_share(torch.arange(18), 18, Axis(4, 0))


@given(cp=st.integers(1, 6), chunk=st.integers(1, 4), window=st.none() | st.integers(1, 30), data=st.data())
def test_unmasked_pairs_are_those_that_a_mask_shows(cp, chunk, window, data):
    seq_len = 2 * cp * chunk
    starts = data.draw(st.lists(st.booleans(), min_size=2 * seq_len, max_size=2 * seq_len))
    starts[0] = starts[seq_len] = True
    documents = torch.tensor(starts).cumsum(0)
    index = torch.arange(2 * seq_len)
    positions = index - torch.where(torch.tensor(starts), index, 0).cummax(0).values
    seen = (documents[:, None] == documents) & (index <= index[:, None])
    if window is not None:
        seen &= index > index[:, None] - window
    pairs = seen.sum(1)
    expected = [int(local_share(pairs, seq_len, Axis(cp, rank)).sum()) for rank in range(cp)]
    assert unmasked_pairs(positions, seq_len, cp, window) == expected


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_without_documents_all_ranks_have_the_same_work(cp):
    assert len(set(unmasked_pairs(torch.arange(64).repeat(3), 64, cp))) == 1


def moved(ranks):
    """Who was seen in turn, and a gather's values and gradient against the formula."""
    with joined(ranks, torch.device("cpu"), 60):
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        seen = [int(t[0]) for t in circulate(torch.full((3,), ranks.rank), axis)]
        whole = torch.arange(2.0 * 16).view(2, 16)
        own = local_places(16, axis)
        x = whole[:, own].clone().requires_grad_()
        out = gather_sequence(x, axis, 1)
        (grad,) = torch.autograd.grad((out * whole * (ranks.rank + 1)).sum(), x)
        total = sum(range(1, ranks.world + 1))
        return seen, torch.equal(out, whole), torch.equal(grad, whole[:, own] * total)


@pytest.mark.parametrize("world", [2, 4])
def test_tensors_go_around_and_gradients_come_back_summed(world):
    for rank, (seen, *same) in enumerate(run_ranks(moved, world)):
        assert seen == [(rank - step) % world for step in range(world)]
        assert same == [True, True]
