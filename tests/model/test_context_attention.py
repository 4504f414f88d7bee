"""Attention over several ranks' keys and values equals one process's, forward and backward, whatever is masked."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from launch.spawn import run_ranks
from model.attention import Attention, attention_context
from model.attention_kernels import causal_blocks
from model.config import ModelConfig
from model.context_attention import RingBlocks
from model.ring_attention import BlockProducts, Pair, Saved, flash_backward, flash_forward, merge
from model.rope import inverse_wavelengths
from parallel.context import gather_sequence, local_places, local_share, pass_on
from parallel.cuts import Cuts
from parallel.mesh import ALONE, Axis
from parallel.process import joined
from tests.model import flash_model
from tests.model.test_attention import borders, document_positions, filled

SEQ = 32  # with 4 ranks: chunks of 4 tokens
HIDDEN, HEADS, KV, DIM = 24, 4, 2, 8


@dataclass(frozen=True)
class Case:
    """What is masked in a micro-batch."""

    lengths: tuple[int, ...] = (SEQ, SEQ)
    seq_len: int = SEQ
    window: int | None = None
    documents: bool = True
    group: int = HEADS // KV


CASES = {
    "no documents": Case(documents=False),
    "uneven documents": Case((5, 1, 20, 6, 13, 19)),
    "documents cut by every chunk border": Case((2, *[4] * 7, 2, 3, *[4] * 7, 1)),
    "documents between chunk borders": Case((4,) * 16),
    "documents of one token": Case((1,) * SEQ + (30, 1, 1)),
    "documents within one chunk": Case((9, 2, 21, 17, 1, 1, 13)),
    "a window": Case(window=7, documents=False),
    "a window of one token": Case(window=1, documents=False),
    "a window longer than half the sequence": Case(window=21, documents=False),
    "a window and documents": Case((11, 21, 2, 29, 1), window=6),
    "a wide window and documents": Case((18, 14, 30, 2), window=17),
    "one sequence": Case((20, 12)),
    "one query head a KV head": Case((20, 12), group=1),
    "blocks of several sizes": Case((700, 100, 4, 348), seq_len=1152),
}
SMALL = {name: case for name, case in CASES.items() if case.seq_len == SEQ}
SWITCHES = [("ring", False), ("all_gather", False)]
"""(exchange, whether the forward pass is made again)."""


def module_and_share(case, axis=ALONE, exchange="ring", recompute=False, dtype=torch.float64):
    """The same module everywhere, this rank's x [T/cp, hidden], and its output's weights in the loss [T/cp, hidden]."""
    config = ModelConfig(
        hidden=HIDDEN, heads=KV * case.group, kv_heads=KV, head_dim=DIM, window=case.window, qk_norm=True
    )
    torch.manual_seed(0)
    module = filled(Attention(config, Cuts(cp=axis, exchange=exchange))).to(dtype)
    module.recompute = recompute
    x, y = torch.randn(2, sum(case.lengths), HIDDEN, dtype=torch.float64).to(dtype)
    x, y = (local_share(t, case.seq_len, axis).clone() for t in (x, y))
    return module, x, y


def results(module, x, y, case, axis, exchange):
    """Output [T/cp, hidden], gradient of x, gradients of the weights."""
    context = attention_context(
        local_share(document_positions(case.lengths), case.seq_len, axis), borders(case.lengths), case.seq_len,
        inverse_wavelengths(DIM, 1e4), dtype=x.dtype, window=case.window, documents=case.documents,
        cp=axis, exchange=exchange,
    )  # fmt: skip
    out = module(x.requires_grad_(), context)
    grads = torch.autograd.grad((out * y).sum(), [x, *module.parameters()])
    return [t.detach() for t in (out, *grads)]


def attended(case, axis=ALONE, exchange="ring", recompute=False, dtype=torch.float64):
    """Results of a case."""
    module, x, y = module_and_share(case, axis, exchange, recompute, dtype)
    return results(module, x, y, case, axis, exchange)


@cache
def alone(case):
    """One process's results."""
    return attended(case)


def every_case(ranks, cases, switches, dtype, flash):
    """Results of all cases, by case and switch; with `flash`, by the flash kernel's path and a model of the kernel."""
    with joined(ranks, torch.device("cpu"), 60), flash_model.instead() if flash else nullcontext():
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        return {
            (name, switch): attended(case, axis, switch[0], switch[1], dtype)
            for name, case in cases.items()
            for switch in switches
        }


def assert_equal(found, case, key, world, tolerance):
    """Ranks' shares put together against one process in fp64."""
    places = [local_places(case.seq_len, Axis(world, rank)) for rank in range(world)]
    for number, expected in enumerate(alone(case)):
        parts = [each[key][number].double() for each in found]
        if number < 2:  # by tokens
            whole = torch.empty_like(expected).view(-1, case.seq_len, HIDDEN)
            for part, at in zip(parts, places, strict=True):
                whole[:, at] = part.view(len(whole), -1, HIDDEN)
            got = whole.view_as(expected)
        else:
            got = torch.stack(parts).sum(0)
        error = (got - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error <= tolerance, f"{key}: result {number} is off by {error:.2g}"


@pytest.mark.parametrize("world", [2, 4])
def test_shared_attention_and_its_gradients_equal_one_process(world):
    found = run_ranks(every_case, world, CASES, SWITCHES, torch.float64, False)
    for name, case in CASES.items():
        for switch in SWITCHES:
            assert_equal(found, case, (name, switch), world, 1e-11)


def test_attention_made_again_in_backward_sends_its_messages_again():
    cases = {name: CASES[name] for name in ("a window and documents", "blocks of several sizes")}
    switches = [("ring", True), ("all_gather", True)]
    found = run_ranks(every_case, 2, cases, switches, torch.float64, False)
    for name, case in cases.items():
        for switch in switches:
            assert_equal(found, case, (name, switch), 2, 1e-11)


def test_the_flash_paths_segments_equal_one_process():
    found = run_ranks(every_case, 4, SMALL, SWITCHES, torch.float64, True)
    for name, case in SMALL.items():
        for switch in SWITCHES:
            assert_equal(found, case, (name, switch), 4, 1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precisions_stay_close(dtype, tolerance):
    found = run_ranks(every_case, 2, CASES, SWITCHES, dtype, False)
    for name, case in CASES.items():
        for switch in SWITCHES:
            assert_equal(found, case, (name, switch), 2, tolerance)


def held_and_done(ranks, exchange):
    """(bytes of keys and values that a forward pass holds, bytes that it would hold gathered, its events in order)."""
    buffers, events = {}, []

    def noted_pass(send, receive, *args, **kwargs):
        buffers.update({t.data_ptr(): t.nbytes for t in (send, receive)})
        events.append("send")
        return pass_on(send, receive, *args, **kwargs)

    def noted_gather(*args):
        out = gather_sequence(*args)
        buffers[out.data_ptr()] = out.nbytes
        return out

    def noted_attend(self, step, *args):
        events.append(step)
        return attend(self, step, *args)

    attend = BlockProducts.attend
    with (
        joined(ranks, torch.device("cpu"), 60),
        patch("parallel.context.pass_on", noted_pass),
        patch("model.context_attention.gather_sequence", noted_gather),
        patch.object(BlockProducts, "attend", noted_attend),
        torch.no_grad(),
    ):
        case = CASES["uneven documents"]
        axis = Axis(ranks.world, ranks.rank, dist.group.WORLD)
        module, x, _ = module_and_share(case, axis, exchange)
        context = attention_context(
            local_share(document_positions(case.lengths), SEQ, axis), borders(case.lengths), SEQ,
            inverse_wavelengths(DIM, 1e4), dtype=torch.float64, cp=axis, exchange=exchange,
        )  # fmt: skip
        module(x, context)
    return sum(buffers.values()), 2 * sum(case.lengths) * KV * DIM * 8, events


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_holds_three_ranks_keys_and_values_at_most_and_sends_before_it_computes(world):
    for held, whole, events in run_ranks(held_and_done, world, "ring"):
        assert held == whole * min(3, world) // world
        assert events == [each for step in range(world - 1) for each in ("send", step)] + [world - 1]
    for held, whole, _ in run_ranks(held_and_done, world, "all_gather"):
        assert held == whole


def steps_of(cp, rank, lengths, seq_len, window=None, documents=True):
    """Blocks of a ring's steps on one rank."""
    axis = Axis(cp, rank)
    context = attention_context(
        local_share(document_positions(lengths), seq_len, axis), borders(lengths), seq_len,
        inverse_wavelengths(DIM, 1e4), dtype=torch.float64, window=window, documents=documents, cp=axis,
    )  # fmt: skip
    assert isinstance(context.shared, RingBlocks)
    return context.shared.steps


def area(blocks):
    """Scores computed."""
    return sum((span.stop - span.row) * (span.end - span.begin) for span in blocks.spans)


@pytest.mark.parametrize("cp", [2, 4])
def test_without_documents_every_rank_computes_the_same_number_of_scores_at_every_step(cp):
    chunk = 512
    seq_len = 2 * cp * chunk
    ranks = [steps_of(cp, rank, [seq_len], seq_len, documents=False) for rank in range(cp)]
    areas = [[area(step) for step in steps] for steps in ranks]
    assert all(each == areas[0] for each in areas)
    assert areas[0][1:] == [2 * chunk * chunk] * (cp - 1)
    block = 256
    assert areas[0][0] == 2 * chunk * chunk + chunk * block  # half of the diagonal's squares is left out, by blocks


def test_what_is_wholly_masked_is_not_computed():
    diagonal, *others = steps_of(4, 1, [1] * SEQ, SEQ)
    assert area(diagonal) > 0 and [step.spans for step in others] == [()] * 3
    near = steps_of(4, 3, [SEQ], SEQ, window=2, documents=False)  # chunks 3 and 4: only chunk 2 of rank 2 is near
    assert [bool(step.spans) for step in near] == [True, True, False, False]
    assert area(near[1]) == 4  # the four rows of chunk 3 with one key


def test_gathered_blocks_start_where_the_documents_do():
    places = torch.arange(600)
    first = torch.cat([torch.zeros(300), torch.full((300,), 300)]).long()[None]
    blocks = causal_blocks(places, places, first, None, torch.float64, chunk=600, trim=True)
    assert [tuple(span) for span in blocks.spans] == [(0, 256, 0, 256), (256, 512, 0, 512), (512, 600, 300, 600)]


def test_a_merge_with_rows_that_saw_nothing_adds_nothing():
    out, lse = torch.zeros(3, 2), torch.full((3,), -torch.inf)
    merge(out, lse, torch.full((3, 2), 7.0), torch.tensor([-torch.inf, 0.0, 1.0]))
    assert torch.equal(out, torch.tensor([[0.0, 0.0], [7.0, 7.0], [7.0, 7.0]]))
    merge(out, lse, torch.full((3, 2), 1.0), torch.tensor([2.0, -torch.inf, 1.0]))
    assert torch.equal(out, torch.tensor([[1.0, 1.0], [7.0, 7.0], [4.0, 4.0]]))
    assert lse.tolist() == pytest.approx([2.0, 0.0, 1.0 + torch.tensor(2.0).log().item()])


@pytest.mark.parametrize("window", [(-1, 0), (5, 0), (-1, -1), (3, -1)])
def test_the_calls_of_the_flash_operators_fit_their_schemas(window):
    """They run on CUDA only: here without data, which checks arguments and gives the results' shapes."""
    shapes = ((12, 4, 8), (10, 2, 8), (10, 2, 8))
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    at = torch.empty(4, dtype=torch.int32, device="meta")
    pair = Pair(0, 1, (at, at), None, window)
    out, lse = flash_forward(q, k, v, pair, 6)
    assert out.shape == q.shape and lse.shape == (4, 12) and lse.dtype == torch.float32
    dq, dk, dv = flash_backward(Saved(q, out, lse, q), k, v, pair, 6)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def compiled_and_not(ranks, exchange, recompute):
    """Largest difference between plain and compiled outputs and gradients, and graphs so far, by micro-batch."""
    with joined(ranks, torch.device("cpu"), 60):
        axis, found = Axis(ranks.world, ranks.rank, dist.group.WORLD), []
        module, x, y = module_and_share(Case(), axis, exchange, recompute)
        graphed = torch.compile(module, backend="eager")
        for lengths in ((5, 27, 32), (32, 32), (3, 10, 19, 32)):
            plain, compiled = (results(each, x, y, Case(lengths), axis, exchange) for each in (module, graphed))
            difference = max((a - b).abs().max().item() for a, b in zip(plain, compiled, strict=True))
            found.append((difference, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.parametrize("exchange, recompute", [("ring", False), ("ring", True), ("all_gather", True)])
def test_compiled_code_goes_around_the_messages_and_serves_every_micro_batch(exchange, recompute):
    for found in run_ranks(compiled_and_not, 2, exchange, recompute):
        differences, graphs = zip(*found, strict=True)
        assert max(differences) < 1e-12
        assert graphs[0] > 0 and len(set(graphs)) == 1
