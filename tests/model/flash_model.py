"""What the flash kernel does, as plain loops over segments and heads: for its callers' tests."""

from contextlib import contextmanager
from unittest.mock import patch

import torch


def _scores(q, k, window, scale):
    """q [rows, d], k [keys, d]: the last query stands at the last key; window: how many before and after it sees."""
    left, right = window
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    return (q @ k.t() * scale).masked_fill(~seen, float("-inf"))


def _segments(borders):
    for a, b, c, d in zip(borders[0][:-1], borders[0][1:], borders[1][:-1], borders[1][1:], strict=True):
        assert a <= b and c <= d
        yield slice(int(a), int(b)), slice(int(c), int(d))


def forward(q, k, v, borders, longest, window):
    """Output [rows, heads, d] and log-sum-exp [heads, rows], +inf where nothing is seen; rows of no segment are NaN."""
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    group = q.shape[1] // k.shape[1]
    assert borders[0][-1] == len(q) and borders[1][-1] == len(k) and borders[0].dtype == torch.int32
    for rows, keys in _segments(borders):
        assert rows.stop - rows.start <= longest[0] and keys.stop - keys.start <= longest[1]
        for head in range(q.shape[1]):
            scores = _scores(q[rows, head], k[keys, head // group], window, q.shape[-1] ** -0.5)
            total = torch.logsumexp(scores, -1)
            out[rows, head] = (scores - total.nan_to_num(neginf=0)[:, None]).exp() @ v[keys, head // group]
            lse[head, rows] = total.masked_fill(total == -torch.inf, torch.inf)
    return out, lse


def backward(grad, q, k, v, out, lse, borders, window):
    """Gradients by the log-sum-exps that are given."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    for rows, keys in _segments(borders):
        for head in range(q.shape[1]):
            kv = head // group
            p = (_scores(q[rows, head], k[keys, kv], window, scale) - lse[head, rows, None]).exp()
            g, o = grad[rows, head], out[rows, head]
            ds = p * (g @ v[keys, kv].t() - (g * o).sum(-1, keepdim=True)) * scale
            dq[rows, head] += ds @ k[keys, kv]
            dk[keys, kv] += ds.t() @ q[rows, head]
            dv[keys, kv] += p.t() @ g
    return dq, dk, dv


class _Segments(torch.autograd.Function):
    """`model.attention_kernels.causal_segments`."""

    @staticmethod
    def forward(ctx, q, k, v, borders, longest, window):
        ctx.sides = (-1 if window is None else window - 1, 0)
        out, lse = forward(q, k, v, borders, longest, ctx.sides)
        ctx.save_for_backward(q, k, v, out, lse, *borders)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *borders = ctx.saved_tensors
        return (*backward(grad, q, k, v, out, lse, borders, ctx.sides), None, None, None)


@contextmanager
def instead():
    """Take the flash paths on a CPU."""

    def ring_forward(q, k, v, pair, longest):
        return forward(q, k, v, pair.borders, (longest, longest), pair.window)

    def ring_backward(own, k, v, pair, longest):
        return backward(own.grad, own.q, k, v, own.out, own.lse, pair.borders, pair.window)

    with (
        patch("model.context_attention.flash_takes", lambda *_: True),
        patch("model.context_attention.causal_segments", _Segments.apply),
        patch("model.ring_attention.flash_forward", ring_forward),
        patch("model.ring_attention.flash_backward", ring_backward),
    ):
        yield
