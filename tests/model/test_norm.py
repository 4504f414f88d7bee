"""The norm by pieces equals the formula."""

import pytest
import torch

from model.norm import RMSNorm


@pytest.mark.parametrize("shape", [(1, 8), (256, 8), (300, 16), (2, 130, 3, 8)])
def test_value_and_gradients_equal_the_formula(shape):
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], 1e-5).double()
    norm.weight.data.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randn(shape, dtype=torch.float64)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    grads = [torch.autograd.grad((out * y).sum(), [x, norm.weight]) for out in (norm(x), plain)]
    torch.testing.assert_close(norm(x), plain)
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference)


def test_bf16_is_rounded_once_at_the_end():
    x, norm = torch.randn(300, 512), RMSNorm(512, 1e-5)
    exact = norm(x.bfloat16().double().float())
    rounded = norm.bfloat16()(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())
