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

from data.batch import IGNORE
from parallel.collectives import gather_plain
from parallel.mesh import ALONE, Axis

_NO_GRADIENT = (None,) * 5  # of what is neither input nor weight
_ROWS = 32  # rows of logits worked on at a time on a CPU, so that their fp32 form stays in the cache


@dataclass(frozen=True)
class LossSettings:
    """How the loss of one micro-batch is made."""

    vocab_size: int
    """Entries that may be predicted, on this rank; the rows of its head beyond them are padding."""
    chunk: int
    """Tokens whose logits exist at one time."""
    z_loss: float
    """Coefficient of logsumexp^2 in the objective."""
    offset: int = 0
    """First entry of the vocabulary that this rank's head has."""
    axis: Axis = ALONE
    """Ranks that share the vocabulary."""


def chunk_terms(
    logits: Tensor, labels: Tensor, settings: LossSettings, scale: float | Tensor, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Losses of one chunk; its logits [C, this rank's entries] become their own gradient, in place.

    Args:
        logits: compute dtype; with_grad: afterwards scale * d(sum of cross-entropy + z_loss * logsumexp^2) / d logits.
        labels: [C] int64, IGNORE where there is no target.

    Returns:
        (sum of cross-entropy, sum of logsumexp^2) in fp32 (fp64 for fp64 logits), over the whole vocabulary.
    """
    apart = settings.axis.group is not None  # then one message a chunk, not one for each few rows
    rows = len(logits) if apart or torch.compiler.is_compiling() or logits.device.type != "cpu" else _ROWS
    logits[:, settings.vocab_size :] = float("-inf")
    sums = [
        _row_terms(logits[row : row + rows], labels[row : row + rows], settings, scale if with_grad else None)
        for row in range(0, len(logits), rows)
    ]
    losses, squares = (torch.stack(parts).sum() for parts in zip(*sums, strict=True))
    return losses, squares


def _row_terms(
    logits: Tensor, labels: Tensor, settings: LossSettings, scale: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """`chunk_terms` of a few rows, whose fp32 form fits the cache; scale None: the gradient is not needed."""
    valid = (labels != IGNORE)[:, None]
    target = labels.clamp(min=0)[:, None]
    if settings.axis.group is None:
        own = valid
        log_p = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        log_target = log_p.gather(1, target)
        lse = logits.gather(1, target) - log_target
    else:
        target = target - settings.offset
        own = valid & (target >= 0) & (target < settings.vocab_size)
        target = target.clamp(0, logits.shape[1] - 1)
        log_p, log_target, lse = _shared_softmax(logits, target, own, settings)
    losses, squares = -(log_target * valid).sum(), (lse.square() * valid).sum()
    if scale is not None:
        grad = log_p.exp_()
        if settings.z_loss:
            grad *= 1.0 + 2.0 * settings.z_loss * lse
        grad.scatter_add_(1, target, -own.to(grad.dtype))
        logits.copy_(grad.mul_(valid).mul_(scale))
    return losses, squares


def _shared_softmax(
    logits: Tensor, target: Tensor, own: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax over a vocabulary whose entries lie on several ranks, by one small exchange.

    Args:
        logits: [C, this rank's entries].
        target: [C, 1] index among them of the label, where `own`.

    Returns:
        log p [C, this rank's entries], log p of the label [C, 1], logsumexp [C, 1], in fp32 or fp64.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if settings.vocab_size:
        log_p = F.log_softmax(logits, -1, dtype=wide)
        local = logits[:, :1] - log_p[:, :1]
    else:  # nothing but padding here, of which a softmax would make NaN
        log_p = logits.to(wide)
        local = log_p[:, :1]
    chosen = (logits.gather(1, target).to(wide)).where(own, torch.zeros((), dtype=wide, device=logits.device))
    every = gather_plain(torch.cat([local, chosen], 1), settings.axis)  # [ranks, C, 2]
    lse = every[..., :1].logsumexp(0)
    log_target = every[..., 1:].sum(0) - lse
    shift = torch.where(local == float("-inf"), 0.0, local - lse)
    return log_p.add_(shift), log_target, lse


class _ChunkedLoss(torch.autograd.Function):
    """Returns (objective, cross-entropy sum, logsumexp^2 sum); only the objective is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        settings: LossSettings,
        scale: float | Tensor,
        terms: Any,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `chunked_loss`; both gradients are made here."""
        wide = torch.promote_types(x.dtype, torch.float32)
        losses, squares = (torch.zeros((), dtype=wide, device=x.device) for _ in range(2))
        dx = torch.empty_like(x) if with_grad else None
        dw = torch.zeros_like(weight, dtype=wide) if with_grad else None
        for begin in range(0, len(x), settings.chunk):
            part = slice(begin, begin + settings.chunk)
            logits = F.linear(x[part], weight)
            loss, square = terms(logits, labels[part], settings, scale, with_grad)
            losses, squares = losses + loss, squares + square
            if dx is not None and dw is not None:  # the logits are their gradient now
                dx[part] = logits @ weight
                _add_product(dw, logits.t(), x[part])
        ctx.save_for_backward(*([dx, dw] if with_grad else []))
        ctx.mark_non_differentiable(losses, squares)
        return (losses + settings.z_loss * squares) * scale, losses, squares

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if grad.device.type == "cpu" and grad.item() == 1.0:  # as in training; elsewhere asking would wait
            return dx, dw, *_NO_GRADIENT
        # In place: a second fp32 gradient of the head is what a step's memory has no room for.
        return dx.mul_(grad.to(dx.dtype)), dw.mul_(grad), *_NO_GRADIENT


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a tensor of its own where formats are the same."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def chunked_loss(
    x: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings, scale: float | Tensor, terms: Any = chunk_terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a micro-batch's tokens under a linear head.

    Args:
        x: [T, hidden] after the final norm.
        weight: [padded vocabulary / tp, hidden].
        labels: [T] int64, IGNORE where there is no target.
        scale: 1 / number of valid tokens in the whole step, so that micro-batches simply add up; times
            fp16's loss scale, a device scalar then: it has to be in the gradients before they are rounded to fp16, and
            that is done here, not in the backward pass.
        terms: `chunk_terms`, or its compiled form.

    Returns:
        Objective (differentiable, scaled), sum of cross-entropy in nats, sum of logsumexp^2.
    """
    result: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(
        x, weight, labels, settings, scale, terms, torch.is_grad_enabled()
    )
    return result
