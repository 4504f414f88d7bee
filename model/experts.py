"""The experts of this rank: many MLPs, each for the rows of its tokens.

rows [M, h] sorted by expert -> gate_up [M, 2f] -> silu(gate) * up * weight [M, f] -> down [M, h]

A row's weight stands before `down`, so that of size [M, h] nothing but the rows is kept for the backward pass; the
activation is made again there. CUDA has grouped products in bf16; elsewhere the experts follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.pieces import pieces
from parallel.cuts import Cuts
from parallel.fp8.linear import fp8_grouped
from parallel.later import LaterGradients
from parallel.recompute import recomputed

Gradients = tuple[Tensor | None, ...]


class Experts(nn.Module):
    """This rank's E/ep experts; gate_up's first f rows of each are the gate's (gelu has none)."""

    cut_along: ClassVar[dict[str, int]] = {"gate_up": 0, "down": 0}
    cut_axis: ClassVar[str] = "ep"

    def __init__(self, config: ModelConfig, cuts: Cuts, device: torch.device | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("model.moe is null: there are no experts to make")
        count, width = config.moe.experts // cuts.ep.size, config.moe.ffn
        self.gated, self.later = config.activation == "swiglu", cuts.later
        wide = 2 * width if self.gated else width
        self.gate_up = nn.Parameter(torch.empty(count, wide, config.hidden, device=device))
        self.down = nn.Parameter(torch.empty(count, config.hidden, width, device=device))
        self.fp8 = fp8 = cuts.fp8_of("experts")
        self.slots = {name: fp8.slot(count, expert=True) for name in self.cut_along} if fp8 else {}
        self.recompute = False

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert, times its weight.

        Args:
            rows: [M, h] sorted by expert.
            weights: [M] in the same dtype.
            counts: [E/ep] int64, how many rows are each expert's; M in all.

        Returns:
            [M, h].
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return self._results(rows, weights, counts)
        # Inside the module, so that FSDP's hooks stand around both passes.
        return recomputed(self._results, rows, weights, counts, fp8=self.fp8)  # type: ignore[no-any-return]

    def _results(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        result: Tensor
        if self.fp8 is not None and self.fp8.active:
            return self._in_fp8(rows, weights, counts.tolist())
        if rows.device.type != "cpu" and rows.dtype == torch.bfloat16 and len(rows) > 0:
            ends = counts.cumsum(0).to(torch.int32)  # stays on the device
            result = GroupedExperts.apply(rows, weights, self.gate_up, self.down, ends, self.gated, self.later)
        else:
            sizes = counts.tolist()
            result = ExpertsInTurn.apply(rows, weights, self.gate_up, self.down, sizes, self.gated, self.later)
        return result

    def _in_fp8(self, rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        wide = fp8_grouped(rows, self.gate_up, sizes, self.slots["gate_up"], self.later)
        if self.gated:
            gate, up = wide.chunk(2, -1)
            act = F.silu(gate) * up * weights[:, None]
        else:
            act = F.gelu(wide, approximate="tanh") * weights[:, None]
        return fp8_grouped(act, self.down, sizes, self.slots["down"], self.later)


class GroupedExperts(torch.autograd.Function):
    """All experts in one product, for CUDA in bf16.

    Every operand's rows are whole multiples of 16 bytes, as the kernels want: hidden and f are multiples of 8.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, gate_up: nn.Parameter, down: nn.Parameter, ends: Tensor,
        gated: bool, later: LaterGradients | None,
    ) -> Tensor:  # fmt: skip
        """rows [M, h], weights [M], ends [E/ep] int32 where each expert's rows end -> [M, h]."""
        wide = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        act = rows.new_empty(len(rows), down.shape[2])
        activate(wide, weights, gated, act)
        ctx.save_for_backward(rows, weights, wide, ends)
        ctx.parameters, ctx.gated, ctx.later = (gate_up, down), gated, later
        return F.grouped_mm(act, down.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Gradients of rows and weights; those of the experts now or later."""
        rows, weights, wide, ends = ctx.saved_tensors
        gate_up, down = ctx.parameters
        grad = grad.contiguous()
        d_act = F.grouped_mm(grad, down, offs=ends)
        act, d_wide = torch.empty_like(d_act), torch.empty_like(wide)
        d_weights = activate_backward(d_act, wide, weights, ctx.gated, act, d_wide)
        d_rows = F.grouped_mm(d_wide, gate_up, offs=ends)
        makers = partial(_grouped_gradient, d_wide, rows, ends), partial(_grouped_gradient, grad, act, ends)
        return d_rows, d_weights, *_gradients(ctx.parameters, makers, ctx.later), None, None, None


def _grouped_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [M, out], x [M, in] -> [E/ep, out, in]."""
    made = F.grouped_mm(grad.t(), x, offs=ends)
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return made.masked_fill_(idle[:, None, None], 0.0)  # not zero by itself on every GPU: PyTorch's issue 172439


def _gradients(
    parameters: tuple[nn.Parameter, ...], makers: tuple[Callable[[], Tensor], ...], later: LaterGradients | None
) -> Gradients:
    """What a backward pass returns for the parameters; None for those that are put off."""
    if later is None:
        return tuple(make() for make in makers)
    later.waiting += zip(parameters, makers, strict=True)
    return (None,) * len(parameters)


class ExpertsInTurn(torch.autograd.Function):
    """One expert after another, each from its first product to its last while what it works on is in the cache.

    A product's surplus rows are written where the next expert writes after it; behind the last row there is room.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, gate_up: nn.Parameter, down: nn.Parameter, counts: list[int],
        gated: bool, later: LaterGradients | None,
    ) -> Tensor:  # fmt: skip
        """rows [M, h], weights [M], counts of each expert's rows -> [M, h]."""
        most = padded(max(counts))
        wide = rows.new_empty(len(rows) + most, gate_up.shape[1])
        out, act = rows.new_empty(len(rows) + most, rows.shape[1]), rows.new_empty(most, down.shape[2])
        for span in _spans(counts):
            torch.mm(span.filled(rows), gate_up[span.expert].t(), out=wide[span.place])
            activate(wide[span.own], weights[span.own], gated, act[: span.rows])
            torch.mm(act[: span.padded], down[span.expert].t(), out=out[span.place])
        ctx.save_for_backward(rows, weights, wide)
        ctx.parameters, ctx.counts, ctx.gated, ctx.later = (gate_up, down), counts, gated, later
        return out.resize_(rows.shape)  # a slice would be a view, of which FSDP warns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Gradients of rows and weights; those of the experts now or later."""
        rows, weights, wide = ctx.saved_tensors
        gate_up, down = ctx.parameters
        grad, most, keep = grad.contiguous(), padded(max(ctx.counts)), ctx.later is not None
        d_rows, d_weights = rows.new_empty(len(rows) + most, rows.shape[1]), torch.empty_like(weights)
        products = _WeightProducts(gate_up, ctx.counts, keep), _WeightProducts(down, ctx.counts, keep)
        buffers = rows.new_empty(0 if keep else most, wide.shape[1]), rows.new_empty(0 if keep else most, down.shape[2])
        for span in _spans(ctx.counts):
            g, x = span.filled(grad), span.filled(rows)
            d_act = g @ down[span.expert]
            d_wide, act = (span.buffer(each, keep) for each in buffers)
            d_weights[span.own] = activate_backward(
                d_act[: span.rows], wide[span.own], weights[span.own], ctx.gated, act[: span.rows], d_wide[: span.rows]
            )
            torch.mm(d_wide, gate_up[span.expert], out=d_rows[span.place])
            products[0].add(span.expert, d_wide, x)
            products[1].add(span.expert, g, act)
        makers = products[0].gradient, products[1].gradient
        return d_rows[: len(rows)], d_weights, *_gradients(ctx.parameters, makers, ctx.later), None, None, None


class _Span(NamedTuple):
    """The rows of one expert that has any."""

    expert: int
    first: int
    """Its first row."""
    rows: int
    """How many it has."""
    padded: int
    """How many its products have."""

    @property
    def own(self) -> slice:
        """Its rows."""
        return slice(self.first, self.first + self.rows)

    @property
    def place(self) -> slice:
        """The rows of its products."""
        return slice(self.first, self.first + self.padded)

    def filled(self, x: Tensor) -> Tensor:
        """Its rows of x [M, n], then what follows there, or zeros behind the last row: [padded, n]."""
        if self.first + self.padded <= len(x):
            return x[self.place]
        out = x.new_zeros(self.padded, x.shape[1])
        out[: self.rows] = x[self.own]
        return out

    def buffer(self, shared: Tensor, keep: bool) -> Tensor:
        """[padded, n] to be filled: of a `shared` [most, n], or of its own to keep; zeros behind its rows."""
        out = shared.new_empty(self.padded, shared.shape[1]) if keep else shared[: self.padded]
        out[self.rows :].zero_()
        return out


def _spans(counts: list[int]) -> Iterator[_Span]:
    first = 0
    for expert, rows in enumerate(counts):
        if rows:
            yield _Span(expert, first, rows, padded(rows))
        first += rows


def padded(rows: int) -> int:
    """The next of 16 sizes an octave.

    oneDNN compiles a product for every shape that it meets, which takes ten times as long as the product itself.
    Loads differ from step to step; the shapes must not.
    """
    step = max(16, (1 << rows.bit_length()) // 32)
    return -(-rows // step) * step


class _WeightProducts:
    """The gradient of one parameter [E, out, in]: each expert's grad^T x, made at once or kept to be made later."""

    def __init__(self, parameter: nn.Parameter, counts: list[int], keep: bool) -> None:
        self.parameter, self.counts = parameter, counts
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.made = None if keep else self._begun()

    def _begun(self) -> Tensor:
        """Zeros for experts without rows."""
        made = torch.empty_like(self.parameter)
        for expert, rows in enumerate(self.counts):
            if rows == 0:
                made[expert].zero_()
        return made

    def add(self, expert: int, grad: Tensor, x: Tensor) -> None:
        """grad [rows, out], x [rows, in]."""
        if self.made is None:
            self.kept[expert] = grad, x
        else:
            torch.mm(grad.t(), x, out=self.made[expert])

    def gradient(self) -> Tensor:
        """[E, out, in]."""
        if self.made is None:
            self.made = self._begun()
            for expert, (grad, x) in self.kept.items():
                torch.mm(grad.t(), x, out=self.made[expert])
        return self.made


def activate(wide: Tensor, weights: Tensor, gated: bool, out: Tensor) -> None:
    """out [m, f] = silu(gate) * up * weights with wide [m, 2f] = (gate, up), or gelu(wide) * weights; weights [m]."""
    width = out.shape[1]
    for piece in pieces(out):
        act, w = out[piece], weights[piece, None]
        if gated:
            torch.ops.aten.silu.out(wide[piece, :width], out=act)
            act.mul_(wide[piece, width:]).mul_(w)
        else:
            torch.ops.aten.gelu.out(wide[piece], approximate="tanh", out=act)
            act.mul_(w)


def activate_backward(
    grad: Tensor, wide: Tensor, weights: Tensor, gated: bool, act: Tensor, d_wide: Tensor
) -> Tensor:  # fmt: skip
    """The gradient [m] of weights, from that of `activate`'s output, grad [m, f], which is overwritten.

    Writes the output itself to act [m, f], and the gradient of wide to d_wide.
    """
    width, d_weights = act.shape[1], torch.empty_like(weights)
    for piece in pieces(act):
        g, h, w, first = grad[piece], act[piece], weights[piece, None], wide[piece, :width]
        if gated:
            up, silu = wide[piece, width:], F.silu(first)
            torch.mul(silu, up, out=h)
        else:
            torch.ops.aten.gelu.out(first, approximate="tanh", out=h)
        d_weights[piece] = (g * h).sum(-1)
        h.mul_(w)
        g.mul_(w)
        if gated:
            torch.mul(g, silu, out=d_wide[piece, width:])
            torch.ops.aten.silu_backward.grad_input(g.mul_(up), first, grad_input=d_wide[piece, :width])
        else:
            torch.ops.aten.gelu_backward.grad_input(g, first, approximate="tanh", grad_input=d_wide[piece])
    return d_weights
