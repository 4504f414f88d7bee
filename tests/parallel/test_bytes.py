"""What a rank sends to share experts or sequences is, to the byte, what a formula says."""

from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from launch.spawn import run_ranks
from model.attention import attention_context
from model.config import ModelConfig, MoEConfig
from model.context import BlockContext
from model.moe import MoE
from model.rope import inverse_wavelengths
from parallel.context import local_share
from parallel.cuts import Cuts
from parallel.mesh import ALONE, Axis
from parallel.process import joined
from tests.model.test_attention import borders, document_positions
from tests.model.test_context_attention import CASES, DIM, KV, SEQ, module_and_share

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 24, (20, 27, 34, 41)  # tokens of each rank
DTYPES = (torch.float32, torch.bfloat16)
NO_ATTENTION: Any = None
LAYERS = [(way, dtype, way == "again") for way in ("any", "again", "drop", "home", "away") for dtype in DTYPES]
"""(where a token's experts are, dtype, whether experts are made again in the backward pass)."""
SWITCHES = [(way, dtype, again) for way in ("ring", "all_gather") for dtype in DTYPES for again in (False, True)]
"""(exchange, dtype, whether attention is made again)."""
KINDS = ("all", "reduce", "gather", "scatter", "broadcast", "barrier")
COLLECTIVES = [name for name in dir(dist.ProcessGroup) if name.lstrip("_").startswith(KINDS)]


@contextmanager
def messages():
    """(to, bytes) of each message that this rank sends; collectives, whose bytes nobody sees, are refused."""
    sent, send = [], dist.ProcessGroup.send

    def noted(self, tensors, to, tag):
        sent.append((to, sum(t.nbytes for t in tensors)))
        return send(self, tensors, to, tag)

    refused = Mock(side_effect=AssertionError("a collective, of which the formulas know nothing"))
    counted: dict[str, Any] = {**dict.fromkeys(COLLECTIVES, refused), "send": noted}
    with patch.multiple(dist.ProcessGroup, **counted):
        yield sent


def total(sent):
    return sum(size for _, size in sent)


def layer_sends(axis, way, dtype, again):
    """Bytes sent in both passes, pairs for each rank's experts, and times that the experts were run."""
    capacity = 0.5 if way == "drop" else None
    moe = MoEConfig(experts=EXPERTS, top_k=TOP_K, ffn=16, shared_ffn=8, capacity_factor=capacity)
    torch.manual_seed(axis.rank)
    layer = MoE(ModelConfig(hidden=HIDDEN, moe=moe), Cuts(ep=axis)).to(dtype)
    layer.router.reset_buffers()
    layer.recompute = layer.experts.recompute = again
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
    local = EXPERTS // axis.size
    layer.router.balance.view(axis.size, local)[axis.rank] = {"home": 2.0, "away": -2.0}.get(way, 0.0)
    routed = []
    layer.router.register_forward_hook(lambda _module, _inputs, routing: routed.append(routing))
    x = torch.randn(TOKENS[axis.rank], HIDDEN).to(dtype).requires_grad_()
    with messages() as sent, patch.object(layer.experts, "_results", wraps=layer.experts._results) as passes:
        layer(x, BlockContext(NO_ATTENTION, 8, 0.0)).sum().backward()
    ((experts, _, kept),) = routed
    owners = (experts if kept is None else experts[kept]) // local
    return total(sent), owners.flatten().bincount(minlength=axis.size).tolist(), passes.call_count


def on_ranks(ranks, sends, cases):
    with joined(ranks, torch.device("cpu"), 60):
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        return [sends(axis, *case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_a_pair_that_leaves_its_rank_costs_four_rows_and_two_weights_and_one_at_home_nothing(world):
    counts = (world - 1) * EXPERTS // world * 8
    ranks = run_ranks(on_ranks, world, layer_sends, LAYERS)
    for (way, dtype, again), found in zip(LAYERS, zip(*ranks, strict=True), strict=True):
        table, chosen = [pairs for _, pairs, _ in found], TOP_K * sum(TOKENS[:world])
        leave = [sum(pairs) - pairs[rank] for rank, pairs in enumerate(table)]
        arrive = [sum(column) - column[rank] for rank, column in enumerate(zip(*table, strict=True))]
        for rank, (sent, _, passes) in enumerate(found):
            # Rows and weights go out, results come back, and the gradient of each goes the other way.
            assert sent == (leave[rank] + arrive[rank]) * (2 * HIDDEN + 1) * dtype.itemsize + counts
            assert passes == 1 + again
        away = sum(leave)
        assert sum(sent for sent, _, _ in found) == away * (4 * HIDDEN + 2) * dtype.itemsize + world * counts
        fewest, most = {"home": (0, 0), "away": (chosen, chosen)}.get(way, (1, chosen - 1))
        assert fewest <= away <= most and (sum(map(sum, table)) < chosen) == (way == "drop")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_with_all_experts_sends_nothing(dtype):
    assert layer_sends(ALONE, "any", dtype, False) == (0, [TOKENS[0] * TOP_K], 1)


def attention_sends(axis, exchange, dtype, again):
    """Messages of the forward and of the backward pass."""
    case = CASES["uneven documents"]
    module, x, y = module_and_share(case, axis, exchange, again, dtype)
    context = attention_context(
        local_share(document_positions(case.lengths), SEQ, axis), borders(case.lengths), SEQ,
        inverse_wavelengths(DIM, 1e4), dtype=dtype, cp=axis, exchange=exchange,
    )  # fmt: skip
    with messages() as forward:
        out = module(x.requires_grad_(), context)
    with messages() as backward:
        (out * y).sum().backward()
    return forward, backward


@pytest.mark.parametrize("cp", [2, 4])
def test_keys_and_values_go_to_each_other_rank_once_and_their_gradients_come_back(cp):
    """A ring's backward passes them around again, and fp32 sums of their gradients to the owner."""
    for rank, found in enumerate(run_ranks(on_ranks, cp, attention_sends, SWITCHES)):
        for (exchange, dtype, again), (forward, backward) in zip(SWITCHES, found, strict=True):
            features = 2 * 2 * SEQ // cp * KV * DIM
            once = (cp - 1) * features * dtype.itemsize
            assert total(forward) == once
            assert total(backward) == (once + (cp - 1) * features * 4 if exchange == "ring" else once) + again * once
            others = {(rank + 1) % cp} if exchange == "ring" else set(range(cp)) - {rank}
            assert {to for to, _ in forward} == {to for to, _ in backward} == others
