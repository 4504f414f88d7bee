"""Messages sent straight from rank to rank give what the backend's own collectives give."""

import pytest
import torch
import torch.distributed as dist

from launch.spawn import run_ranks
from parallel.collectives import add_up, exchange_sum, gather_plain, gather_tokens, scatter_sum
from parallel.exchange import gather_into, reduce_into
from parallel.mesh import Axis
from parallel.process import joined


def both_ways(ranks, dtype):
    with joined(ranks, torch.device("cpu"), 60):
        group = dist.group.WORLD
        assert group is not None
        x = torch.randn(6 * ranks.world, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
        direct, own = torch.empty(6, 5, dtype=dtype), torch.empty(6, 5, dtype=dtype)
        reduce_into(direct, x, group)
        dist.reduce_scatter_single(own, x.clone(), group=group)
        gathered, plain = torch.empty_like(x), torch.empty_like(x)
        gather_into(gathered, x[:6], group)
        dist.all_gather_single(plain, x[:6].contiguous(), group=group)
        in_place = torch.zeros_like(x)
        in_place[6 * ranks.rank : 6 * (ranks.rank + 1)] = x[:6]
        gather_into(in_place, in_place[6 * ranks.rank : 6 * (ranks.rank + 1)], group)
        exact = (
            torch.stack(
                [
                    torch.randn(6 * ranks.world, 5, generator=torch.Generator().manual_seed(r)).to(dtype)
                    for r in range(ranks.world)
                ]
            )[:, 6 * ranks.rank : 6 * (ranks.rank + 1)]
            .double()
            .sum(0)
        )
        assert dtype != torch.bfloat16 or torch.equal(direct, exact.to(dtype)), "rounded more than once"
        return (direct - own).abs().max().item(), torch.equal(gathered, plain), torch.equal(in_place, plain)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 0.1)])
def test_a_direct_exchange_gives_what_the_collective_gives(world, dtype, error):
    for difference, *same in run_ranks(both_ways, world, dtype):
        assert difference <= error and same == [True, True]


def gradients(ranks):
    """d/dx of sum(w * scatter(2 * gather(x))) on each rank, beside the formula."""
    with joined(ranks, torch.device("cpu"), 60):
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        x = (torch.arange(4.0) + 10 * ranks.rank)[:, None].double().requires_grad_()
        weight = torch.arange(4.0).double()[:, None] + ranks.rank
        y = scatter_sum(2 * gather_tokens(x, axis) * (ranks.rank + 1), axis)
        (y * weight).sum().backward()
        total = sum(2.0 * (rank + 1) for rank in range(ranks.world))
        expected = torch.equal(y, total * x) and torch.allclose(x.grad, total * weight)
        each = gather_plain(torch.tensor([float(ranks.rank)]), axis)
        sums = [torch.full((2,), float(ranks.rank)), torch.full((1, 3), 2.0)]
        add_up(sums, axis)
        pair = torch.tensor([1.0, 2.0]) * (ranks.rank + 1)
        if ranks.rank in (0, ranks.world - 1):
            exchange_sum(pair, ranks.world - 1 - ranks.rank, axis)
        return expected, each.flatten().tolist(), [s.flatten()[0].item() for s in sums], pair.tolist()


def test_gradients_pass_gathers_and_scatters():
    found = run_ranks(gradients, 3)
    for rank, (expected, each, sums, pair) in enumerate(found):
        assert expected and each == [0.0, 1.0, 2.0] and sums == [3.0, 6.0]
        assert pair == ([2.0, 4.0] if rank == 1 else [4.0, 8.0])
