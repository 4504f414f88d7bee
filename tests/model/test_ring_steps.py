"""The steps of a ring, played in one process for any documents: together they are the whole product."""

from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import attention_context
from model.context_attention import _chunks, _joined
from model.ring_attention import BlockProducts, Saved
from model.rope import inverse_wavelengths
from parallel.context import local_places, local_share
from parallel.mesh import Axis
from tests.model import flash_model
from tests.model.test_attention import borders, document_positions

KV, GROUP, DIM = 2, 2, 8


def whole(q, k, v, positions, window):
    """q [B, S, kv, g, d], k and v [B, S, kv, d] -> like q, by the formula."""
    at = torch.arange(q.shape[1])
    seen = (at <= at[:, None]) & (at >= (at - positions.view(len(q), -1))[..., None])
    if window:
        seen &= at > at[:, None] - window
    scores = torch.einsum("bikgd,bjkd->bkgij", q, k) / DIM**0.5
    p = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bkgij,bjkd->bikgd", p, v)


class AsBlocks:
    """The layout of the products of blocks: q [B*kv, S*g, d] scaled, kv [2, B*kv, S, d]."""

    scale = DIM**-0.5

    @staticmethod
    def products(shared, batch):
        return BlockProducts(shared.steps, batch, GROUP)

    @staticmethod
    def fold(x):
        """[B, S, kv, d] or [B, S, kv, g, d]."""
        heads_first = x.transpose(1, 2).flatten(0, 1)
        return heads_first.flatten(1, 2) if x.dim() == 5 else heads_first

    @staticmethod
    def unfold(x, like):
        batch, tokens, kv, *rest = like.shape
        return x.view(batch, kv, tokens, *rest).transpose(1, 2)


class AsFlash:
    """That of the flash kernel: q [2, B*c, kv * g, d], kv [2, 2, B*c, kv, d]."""

    scale = 1.0

    @staticmethod
    def products(shared, batch):
        return shared.products

    @staticmethod
    def fold(x):
        return _chunks(x.flatten(2, -2))

    @staticmethod
    def unfold(x, like):
        return _joined(x, like.flatten(2, -2)).view(like.shape)


def play(rank, products, q, kv, grad):
    """One rank's steps: output, gradient of q, gradients of every rank's kv."""
    out, lse = torch.zeros_like(q), products.lse_like(q).fill_(float("-inf"))
    sources = [(rank - step) % len(kv) for step in range(len(kv))]
    for step, source in enumerate(sources):
        products.attend(step, q, kv[source], out, lse)
    saved, dq, dkv = Saved(q, out, lse, grad), torch.zeros_like(q), torch.zeros_like(torch.stack(kv))
    for step, source in enumerate(sources):
        products.differentiate(step, saved, kv[source], dq, dkv[source])
    return out, dq, dkv


def play_all(layout, q, k, v, grad, positions, cu_seqlens, window, cp):
    """Output and gradients of q, k and v, whole."""
    batch, seq_len = q.shape[:2]
    places = [local_places(seq_len, Axis(cp, rank)) for rank in range(cp)]
    kv = [torch.stack([layout.fold(k[:, at]), layout.fold(v[:, at])]) for at in places]
    out, dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, q, k, v))
    dkv = torch.zeros_like(torch.stack(kv))
    for rank, at in enumerate(places):
        axis = Axis(cp, rank)
        shared = attention_context(
            local_share(positions, seq_len, axis), cu_seqlens, seq_len, inverse_wavelengths(DIM, 1e4),
            dtype=torch.float64, window=window, cp=axis,
        ).shared  # fmt: skip
        mine, gradient = layout.fold(q[:, at] * layout.scale), layout.fold(grad[:, at])
        results = play(rank, layout.products(shared, batch), mine, kv, gradient)
        out[:, at] = layout.unfold(results[0], q[:, at])
        dq[:, at] = layout.unfold(results[1], q[:, at]) * layout.scale
        dkv += results[2]
    for source, at in enumerate(places):
        dk[:, at], dv[:, at] = (layout.unfold(dkv[source, number], k[:, at]) for number in (0, 1))
    return out, dq, dk, dv


@pytest.mark.parametrize("layout", [AsBlocks, AsFlash])
@settings(max_examples=40, deadline=None)
@given(
    cp=st.integers(2, 4), chunk=st.integers(1, 5), batch=st.integers(1, 2), window=st.none() | st.integers(1, 40),
    data=st.data(),
)  # fmt: skip
def test_the_steps_of_all_ranks_are_the_whole_product(layout, cp, chunk, batch, window, data):
    seq_len = 2 * cp * chunk
    starts = data.draw(st.sets(st.integers(0, batch * seq_len - 1), max_size=12))
    cuts = sorted(starts | {row * seq_len for row in range(batch + 1)})
    lengths = [after - before for before, after in pairwise(cuts)]
    positions = document_positions(lengths)
    torch.manual_seed(0)
    q, grad = torch.randn(2, batch, seq_len, KV, GROUP, DIM, dtype=torch.float64)
    k, v = torch.randn(2, batch, seq_len, KV, DIM, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    out = whole(q, k, v, positions, window)
    expected = [out.detach(), *torch.autograd.grad(out, tensors, grad)]
    with (
        flash_model.instead() if layout is AsFlash else nullcontext(),
        patch("model.context_attention.MOST_KEYS", 3),
        torch.no_grad(),
    ):
        found = play_all(layout, q, k, v, grad, positions, borders(lengths), window, cp)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-12)
