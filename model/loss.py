"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

The gradient of the logits is known as soon as the logits are, so the forward pass already makes the
gradients of the input and of the head's weight, and no [T, vocab] tensor outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a token without a target


@dataclass(frozen=True)
class LossSettings:
    """How the loss of one micro-batch is made."""

    vocab_size: int
    """Entries that may be predicted; the rows of the head beyond it are padding."""
    chunk: int
    """Tokens whose logits exist at one time."""
    z_loss: float
    """Coefficient of logsumexp^2 in the objective."""


def chunk_terms(
    logits: Tensor, labels: Tensor, settings: LossSettings, scale: float, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and the logits' gradient of one chunk.

    Args:
        logits: [C, padded vocabulary], compute dtype.
        labels: [C] int64, IGNORE where there is no target.
        scale: factor of the objective (1 / valid tokens of the step).
        with_grad: whether the gradient is needed.

    Returns:
        (sum of cross-entropy, sum of logsumexp^2, gradient [C, padded vocabulary] in logits' dtype or empty),
        sums in fp32 (fp64 for fp64 logits).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits[:, settings.vocab_size :] = float("-inf")
    valid = labels != IGNORE
    target = labels.clamp(min=0)[:, None]
    log_p = F.log_softmax(logits, -1, dtype=wide)
    log_target = log_p.gather(1, target)[:, 0]
    lse = logits.gather(1, target)[:, 0].to(wide) - log_target
    losses, squares = -(log_target * valid).sum(), (lse.square() * valid).sum()
    if not with_grad:
        return losses, squares, logits.new_empty(0)
    row = valid.to(wide) * scale
    grad = log_p.exp_()
    grad *= (row * (1.0 + 2.0 * settings.z_loss * lse) if settings.z_loss else row)[:, None]
    grad.scatter_add_(1, target, -row[:, None])
    return losses, squares, grad.to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Returns (objective, cross-entropy sum, logsumexp^2 sum); only the objective is differentiable."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings, scale: float, terms: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        losses, squares = (torch.zeros((), dtype=wide, device=x.device) for _ in range(2))
        with_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dx = torch.empty_like(x) if with_grad else None
        dw = torch.zeros_like(weight, dtype=wide) if with_grad else None
        for begin in range(0, len(x), settings.chunk):
            part = slice(begin, begin + settings.chunk)
            loss, square, grad = terms(F.linear(x[part], weight), labels[part], settings, scale, with_grad)
            losses, squares = losses + loss, squares + square
            if dx is not None and dw is not None:
                dx[part] = grad @ weight
                dw += grad.t() @ x[part]
        ctx.save_for_backward(*([dx, dw] if with_grad else []))
        ctx.mark_non_differentiable(losses, squares)
        return (losses + settings.z_loss * squares) * scale, losses, squares

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx, dw = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dw * grad, None, None, None, None


def chunked_loss(
    x: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings, scale: float, terms: Any = chunk_terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a micro-batch's tokens under a linear head.

    Args:
        x: [T, hidden] after the final norm.
        weight: [padded vocabulary, hidden].
        labels: [T] int64, IGNORE where there is no target.
        scale: 1 / number of valid tokens in the whole step, so that micro-batches simply add up.
        terms: `chunk_terms`, or its compiled form.

    Returns:
        Objective (differentiable, scaled), sum of cross-entropy in nats, sum of logsumexp^2.
    """
    result: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(x, weight, labels, settings, scale, terms)
    return result
