"""The feed-forward half of a block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.pieces import pieces
from parallel.remade import Recipe, recipe
from parallel.tensor import Linears


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, of which nothing but gate and up is kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up [T, f] -> [T, f]."""
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for rows in pieces(gate):
            torch.ops.aten.silu.out(gate[rows], out=out[rows])
            out[rows].mul_(up[rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        for rows in pieces(gate):
            g, first = grad[rows], gate[rows]
            torch.mul(g, F.silu(first), out=d_up[rows])
            torch.ops.aten.silu_backward.grad_input(g * up[rows], first, grad_input=d_gate[rows])
        return d_gate, d_up


def activation(*inputs: Tensor) -> Tensor:
    """silu(gate) * up of gate and up [T, f], or gelu(up) of up alone."""
    if len(inputs) == 1:
        return F.gelu(*inputs, approximate="tanh")
    if torch.compiler.is_compiling():
        gate, up = inputs
        return F.silu(gate) * up
    result: Tensor = _SwiGLU.apply(*inputs)
    return result


class MLP(nn.Module):
    """x [T/tp, hidden] -> [T/tp, hidden]: SwiGLU (Shazeer, 2020: silu(gate) * up) or GELU (tanh form)."""

    def __init__(self, config: ModelConfig, linears: Linears, device: torch.device | None = None) -> None:
        super().__init__()
        shape, bias = (config.hidden, config.ffn), config.bias
        self.linears = linears
        self.gate = linears.column(*shape, bias, device) if config.activation == "swiglu" else None
        self.up = linears.column(*shape, bias, device)
        self.down = linears.row(config.ffn, config.hidden, bias, device)
        self.remakes = True

    def forward(self, x: Tensor, again: Recipe | None = None) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]; `again` is kept instead of x."""
        x = self.linears.gather(x)
        inputs = [each(x, again) for each in (self.gate, self.up) if each is not None]
        act = activation(*inputs)
        return self.down(act, recipe(act, activation, *inputs) if self.remakes else None)  # type: ignore[no-any-return]
