"""The chunked loss equals PyTorch's cross-entropy and autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import IGNORE
from model.loss import LossSettings, chunked_loss


def reference(x, weight, labels, vocab, z_loss, scale):
    logits = (x @ weight.t())[:, :vocab].double()
    valid = labels != IGNORE
    ce = F.cross_entropy(logits[valid], labels[valid], reduction="sum")
    squares = logits.logsumexp(-1)[valid].square().sum()
    return (ce + z_loss * squares) * scale, ce, squares


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40), vocab=st.integers(2, 30), padding=st.integers(0, 5), chunk=st.integers(1, 50),
    z_loss=st.sampled_from([0.0, 1e-2]), masked=st.floats(0, 0.9), factor=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_value_and_gradients_equal_the_plain_form(tokens, vocab, padding, chunk, z_loss, masked, factor, seed):
    torch.manual_seed(seed)
    x = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab + padding, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.where(torch.rand(tokens) < masked, IGNORE, torch.randint(0, vocab, (tokens,)))
    ours = chunked_loss(x, weight, labels, LossSettings(vocab, chunk, z_loss), 1 / 7)
    plain = reference(x, weight, labels, vocab, z_loss, 1 / 7)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(factor * out[0], [x, weight]) for out in (ours, plain)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert not grads[0][1][vocab:].any(), "padding rows take no part"


def test_without_gradients_nothing_is_computed_for_them():
    x, weight = torch.randn(8, 4), torch.randn(10, 4, requires_grad=True)
    calls = []

    def terms(logits, labels, settings, scale, with_grad):
        calls.append(with_grad)
        return logits.sum(), logits.sum()

    labels, settings = torch.zeros(8, dtype=torch.long), LossSettings(10, 4, 0.0)
    with torch.no_grad():
        chunked_loss(x, weight, labels, settings, 1.0, terms)
    assert calls == [False, False]
    chunked_loss(x, weight, labels, settings, 1.0, terms)
    assert calls[2:] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_made_in_fp32(dtype):
    x = torch.randn(4096, 16, dtype=dtype)
    weight = torch.randn(64, 16, dtype=dtype)
    labels = torch.randint(0, 64, (4096,))
    _, ce, squares = chunked_loss(x, weight, labels, LossSettings(64, 512, 0.0), 1.0)
    exact = reference(x.double(), weight.double(), labels, 64, 0.0, 1.0)[1]
    assert ce.dtype == squares.dtype == torch.float32
    assert ce.item() == pytest.approx(exact.item(), rel=2e-3 if dtype == torch.bfloat16 else 1e-6)
