"""The blocked attention equals the plain formula, and the fused path equals the blocked one."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model import attention_kernels
from model.attention import Attention, _first_seen, attention_context
from model.config import ModelConfig
from model.rope import inverse_wavelengths
from parallel.cuts import Cuts


def document_positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


def borders(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def naive(module, x, positions, window):
    """Every pair of tokens, one head at a time, fp64: same document, not later, within the window."""
    tokens, d = len(x), module.head_dim
    qkv = module.qkv(x).view(tokens, module.kv_heads, module.group + 2, d)
    angle = positions[:, None].double() * inverse_wavelengths(d, 10000.0)
    cos, sin = angle.cos(), angle.sin()

    def turn(v):
        a, b = v[:, : d // 2], v[:, d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)

    index = torch.arange(tokens)
    start = index - positions
    seen = (index[None] <= index[:, None]) & (index[None] >= start[:, None])
    if window:
        seen &= index[None] > index[:, None] - window
    heads = []
    for kv in range(module.kv_heads):
        k, v = turn(qkv[:, kv, -2]), qkv[:, kv, -1]
        for g in range(module.group):
            scores = turn(qkv[:, kv, g]) @ k.t() / d**0.5
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)
    return module.out(torch.cat(heads, 1))


def filled(module):
    """With weights, in fp64."""
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


CASES = {
    "one sequence": ([300], 300, None, False),
    "two sequences of several blocks": ([600, 600], 600, None, False),
    "documents within sequences": ([10, 290, 1, 299, 300, 100, 200], 600, None, True),
    "a window": ([600], 600, 70, False),
    "a window larger than a block": ([700, 700], 700, 300, False),
    "a window and documents": ([33, 267, 300], 300, 64, True),
    "longer than what is kept": ([500, 700], 1200, None, True),
}


@pytest.mark.parametrize("lengths, seq_len, window, documents", CASES.values(), ids=CASES.keys())
def test_blocked_attention_and_its_gradients_equal_the_formula(lengths, seq_len, window, documents):
    torch.manual_seed(0)
    config = ModelConfig(hidden=24, heads=4, kv_heads=2, head_dim=6, window=window)
    module = filled(Attention(config, Cuts()))
    positions = document_positions(lengths)
    context = attention_context(
        positions, borders(lengths), seq_len, inverse_wavelengths(6, 10000.0),
        dtype=torch.float64, window=window, documents=documents,
    )  # fmt: skip
    x = torch.randn(len(positions), 24, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(positions), 24, dtype=torch.float64)
    results = []
    for out in (module(x, context), naive(module, x, positions, window)):
        grads = torch.autograd.grad((out * y).sum(), [x, *module.parameters()])
        results.append([out.detach(), *grads])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("lengths, seq_len, window, documents", CASES.values(), ids=CASES.keys())
def test_the_fused_path_equals_the_blocked_one(lengths, seq_len, window, documents):
    torch.manual_seed(0)
    module = filled(Attention(ModelConfig(hidden=24, heads=4, kv_heads=2, head_dim=6), Cuts()))
    positions = document_positions(lengths)
    context = attention_context(
        positions, borders(lengths), seq_len, inverse_wavelengths(6, 10000.0),
        dtype=torch.float64, window=window, documents=documents,
    )  # fmt: skip
    shape = (context.batch, seq_len, 2, 4, 6)
    q, k, v = torch.randn(shape, dtype=torch.float64).split([2, 1, 1], dim=3)
    k, v = k.squeeze(3), v.squeeze(3)
    first = _first_seen(positions.view(-1, seq_len), torch.arange(seq_len), window)
    torch.testing.assert_close(
        module._fused(q, k, v, replace(context, first=first)), module._blocked(q, k, v, context), rtol=1e-10, atol=1e-12
    )


def test_the_call_of_the_cuda_kernel_fits_its_signature():
    """The variable-length kernel runs on CUDA only: its call is bound to the installed signature."""
    from torch.nn.attention.varlen import varlen_attn

    tree = ast.parse(Path(attention_kernels.__file__).read_text())
    calls = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "varlen_attn"
    ]  # fmt: skip
    assert len(calls) == 1
    starred = sum(isinstance(a, ast.Starred) for a in calls[0].args)
    positional = [None] * (len(calls[0].args) - starred + 2 * starred)  # pairs are starred
    inspect.signature(varlen_attn).bind(*positional, **{str(k.arg): None for k in calls[0].keywords})
