"""Experts: the same as a plain loop over them, however uneven their loads, with gradients at once or later."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from model.config import ModelConfig, MoEConfig
from model.experts import Experts, GroupedExperts, padded
from parallel.cuts import Cuts
from parallel.later import LaterGradients

CONFIG = ModelConfig(hidden=24, moe=MoEConfig(experts=4, top_k=2, ffn=16))
LOADS = {
    "uneven": [5, 70, 0, 33], "even": [16, 16, 16, 16], "one takes all": [0, 0, 130, 0],
    "none for the last": [3, 1, 2, 0], "one row": [0, 0, 0, 1], "no row": [0, 0, 0, 0],
}  # fmt: skip
KINDS = pytest.mark.parametrize("activation", ["swiglu", "gelu"])


def made(dtype=torch.float64, later=None, **changes):
    experts = Experts(replace(CONFIG, **changes), Cuts(later=later)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 4)
    return experts


def inputs(counts, dtype=torch.float64, hidden=24):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(counts), hidden, generator=generator, dtype=torch.float64)
    weights = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
    grad = torch.randn(sum(counts), hidden, generator=generator, dtype=torch.float64)
    return rows.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_(), grad.to(dtype)


def looped(experts, rows, weights, counts):
    """The formula, an expert at a time, left to autograd."""
    out = []
    for number, mine in enumerate(rows.split(counts)):
        wide = F.linear(mine, experts.gate_up[number])
        gate, up = wide.chunk(2, -1) if experts.gated else (wide, None)
        act = F.gelu(gate, approximate="tanh") if up is None else F.silu(gate) * up
        out.append(F.linear(act, experts.down[number]))
    return torch.cat(out) * weights[:, None]


def gradients(function, experts, counts, dtype=torch.float64):
    """Output, and gradients of rows, weights, gate_up and down."""
    rows, weights, grad = inputs(counts, dtype)
    out = function(rows, weights)
    experts.zero_grad(set_to_none=True)
    out.backward(grad)
    return [out.detach(), rows.grad, weights.grad, *(weight.grad for weight in experts.parameters())]


def in_one(experts, counts, dtype=torch.float64):
    return gradients(lambda rows, weights: experts(rows, weights, torch.tensor(counts)), experts, counts, dtype)


def assert_equal(ours, wanted, **tolerance):
    for a, b in zip(ours, wanted, strict=True):
        assert a is not None and a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, **tolerance)


@KINDS
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS.keys())
def test_values_and_all_gradients_equal_those_of_a_plain_loop(counts, activation):
    experts = made(activation=activation)
    wanted = gradients(lambda rows, weights: looped(experts, rows, weights, counts), experts, counts)
    assert_equal(in_one(experts, counts), wanted)


@KINDS
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS.keys())
def test_gradients_made_later_are_bitwise_those_made_at_once(counts, activation):
    at_once, later = made(activation=activation), LaterGradients()
    put_off = made(activation=activation, later=later)
    wanted = in_one(at_once, counts)
    ours = in_one(put_off, counts)
    assert ours[3:] == [None, None] and len(later.waiting) == 2
    taken = later.take()
    LaterGradients.run(taken)
    LaterGradients.run(taken)
    assert_equal([*ours[:3], *(weight.grad / 2 for weight in put_off.parameters())], wanted, rtol=0, atol=0)


def kept_by(forward):
    """What a forward pass keeps for the backward pass."""
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return kept


@KINDS
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS.keys())
def test_recomputed_is_bitwise_the_same_and_keeps_the_inputs_alone(counts, activation):
    experts = made(activation=activation)
    wanted = in_one(experts, counts)
    experts.recompute = True
    assert_equal(in_one(experts, counts), wanted, rtol=0, atol=0)
    rows, weights, _ = inputs(counts)
    kept = kept_by(lambda: experts(rows, weights, torch.tensor(counts)))
    assert all(t.dim() < 2 or t.shape[1] == CONFIG.hidden for t in kept)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_narrower_dtypes_are_close(dtype, tolerance):
    counts = [5, 200, 0, 33]
    exact = in_one(made(), counts)
    for ours, wanted in zip(in_one(made(dtype), counts, dtype), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("later", [None, LaterGradients()], ids=["at once", "later"])
@KINDS
@pytest.mark.parametrize("counts", [c for c in LOADS.values() if sum(c)], ids=[n for n, c in LOADS.items() if sum(c)])
def test_grouped_products_are_close_to_those_in_turn(counts, activation, later):
    experts = made(torch.bfloat16, activation=activation)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)

    def grouped(rows, weights):
        gated = activation == "swiglu"
        return GroupedExperts.apply(rows, weights, experts.gate_up, experts.down, ends, gated, later)

    ours = gradients(grouped, experts, counts, torch.bfloat16)
    if later is not None:
        LaterGradients.run(later.take())
        ours[3:] = [weight.grad for weight in experts.parameters()]
    for a, b in zip(ours, in_one(experts, counts, torch.bfloat16), strict=True):
        assert a.shape == b.shape and (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def test_idle_experts_get_zeros_though_a_grouped_product_leaves_garbage(monkeypatch):
    product = F.grouped_mm

    def leaving_garbage(a, b, offs):
        out = product(a, b, offs=offs)
        if a.dim() == b.dim() == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    experts, counts = made(torch.bfloat16), LOADS["uneven"]
    wanted = in_one(experts, counts, torch.bfloat16)
    monkeypatch.setattr("model.experts.F.grouped_mm", leaving_garbage)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    parameters = experts.gate_up, experts.down
    ours = gradients(
        lambda *x: GroupedExperts.apply(*x, *parameters, ends, True, None), experts, counts, torch.bfloat16
    )
    assert_equal(ours[3:], wanted[3:], rtol=2e-2, atol=2e-2)


def test_what_follows_an_experts_rows_does_not_reach_them():
    experts, counts = made(), [5, 70, 0, 33]
    wanted = in_one(experts, counts)

    def spoiled(rows, weights):
        factor = torch.ones(len(rows), 1, dtype=rows.dtype)
        factor[5:] = 1e30
        return experts(rows * factor, weights, torch.tensor(counts))

    ours = gradients(spoiled, experts, counts)
    assert torch.equal(ours[0][:5], wanted[0][:5]) and torch.equal(ours[3][0], wanted[3][0])


def test_sizes_of_products_are_few_and_never_too_small():
    sizes = [padded(rows) for rows in range(1, 5000)]
    assert all(rows <= size <= rows + max(15, rows / 16) for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 16 * 9


def test_nothing_as_wide_as_the_rows_is_kept_but_the_rows():
    experts, counts = made(), [40, 60, 20, 10]
    rows, weights, _ = inputs(counts)
    kept = kept_by(lambda: experts(rows, weights, torch.tensor(counts)))
    assert [t.data_ptr() for t in kept if t.dim() == 2 and t.shape[1] == CONFIG.hidden] == [rows.data_ptr()]
