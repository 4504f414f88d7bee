"""What is made again in the backward pass has the same bits, and is not kept."""

from __future__ import annotations

import weakref
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.mlp import MLP, activation
from model.norm import RMSNorm
from parallel.recompute import recomputed
from parallel.remade import recipe
from parallel.tensor import Linears
from tests.parallel.kept import kept_bytes

SHAPE = ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, ffn=96, vocab_size=64)
TOKENS = 24


def mlp(kind: Literal["swiglu", "gelu"] = "swiglu", dtype: torch.dtype = torch.float32, bias: bool = False) -> MLP:
    torch.manual_seed(0)
    made = MLP(ModelConfig(hidden=32, layers=1, ffn=96, activation=kind, bias=bias), Linears())
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.to(dtype)


def written_out(module: MLP, x: Tensor) -> Tensor:
    """The same as one would write it."""
    up = F.linear(x, module.up.weight, module.up.bias)
    if module.gate is None:
        act = F.gelu(up, approximate="tanh")
    else:
        act = F.silu(F.linear(x, module.gate.weight, module.gate.bias)) * up
    return F.linear(act, module.down.weight, module.down.bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind, bias", [("swiglu", False), ("swiglu", True), ("gelu", False)])
def test_results_and_gradients_have_the_bits_of_what_is_kept(kind, bias, dtype):
    module, norm = mlp(kind, dtype, bias), RMSNorm(32, 1e-5).to(dtype)
    x = torch.randn(TOKENS, 32, dtype=dtype, requires_grad=True)
    inputs = [x, *module.parameters(), *norm.parameters()]
    grad = torch.randn(TOKENS, 32, dtype=dtype)
    plain = written_out(module, norm(x))
    normed = norm(x)
    lean = module(normed, recipe(normed, norm, x))
    assert torch.equal(lean, plain)
    for a, b in zip(torch.autograd.grad(lean, inputs, grad), torch.autograd.grad(plain, inputs, grad), strict=True):
        assert torch.equal(a, b)


def test_swiglu_is_differentiated_right():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(activation, (gate, up))


@pytest.mark.parametrize("kind, width", [("swiglu", 2), ("gelu", 1)])
def test_gate_and_up_are_all_that_is_kept_of_an_mlp(kind, width):
    module, norm = mlp(kind), RMSNorm(32, 1e-5)
    x = torch.randn(TOKENS, 32, requires_grad=True)

    def run() -> Tensor:
        normed = norm(x)
        out: Tensor = module(normed, recipe(normed, norm, x))
        return out

    lean = kept_bytes(run)
    # Of the norm a number a token; of the rest the inputs of the activation.
    assert lean == 4 * TOKENS * (1 + width * 96)
    plain = kept_bytes(lambda: written_out(module, norm(x)))
    assert plain == 4 * TOKENS * (1 + 32 + (4 if kind == "swiglu" else 2) * 96)


def test_a_recipe_is_followed_once_for_all_that_read_it_and_the_result_dropped():
    made: list[weakref.ref[Tensor]] = []

    def double(x: Tensor) -> Tensor:
        out = x * 2
        made.append(weakref.ref(out))
        return out

    x = torch.randn(4, 32, requires_grad=True)
    module = mlp()
    doubled = double(x)
    out = module(doubled, recipe(doubled, double, x))
    made.clear()
    out.sum().backward()
    assert len(made) == 1
    assert made[0]() is None


def test_what_is_not_the_recipes_own_tensor_is_kept():
    """As a tensor-parallel rank's product of all tokens, whose norm has seen but some."""
    module = mlp()
    mine, others = (torch.randn(4, 32) for _ in range(2))
    for tensor in (mine, others):
        tensor.requires_grad_()
    normed = -mine
    out = module(torch.cat([normed, others]), recipe(normed, torch.neg, mine))
    found = torch.autograd.grad(out.sum(), [mine, others])
    plain = torch.autograd.grad(written_out(module, torch.cat([-mine, others])).sum(), [mine, others])
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_where_a_block_is_recomputed_nothing_is_kept_of_its_recipes():
    module, norm = mlp(), RMSNorm(32, 1e-5)
    module.remakes = False
    x = torch.randn(TOKENS, 32, requires_grad=True)
    assert kept_bytes(lambda: recomputed(lambda given: module(norm(given)), x)) == 0


def test_without_gradients_there_is_no_recipe():
    with torch.no_grad():
        assert recipe(-torch.ones(2), torch.neg, torch.ones(2)) is None
