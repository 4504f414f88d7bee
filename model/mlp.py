"""The feed-forward half of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from parallel.tensor import Linears


class MLP(nn.Module):
    """x [T/tp, hidden] -> [T/tp, hidden]: SwiGLU (Shazeer, 2020: silu(gate) * up) or GELU (tanh form)."""

    def __init__(self, config: ModelConfig, linears: Linears, device: torch.device | None = None) -> None:
        super().__init__()
        shape, bias = (config.hidden, config.ffn), config.bias
        self.linears = linears
        self.gate = linears.column(*shape, bias, device) if config.activation == "swiglu" else None
        self.up = linears.column(*shape, bias, device)
        self.down = linears.row(config.ffn, config.hidden, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T/tp, hidden] -> [T/tp, hidden]."""
        x = self.linears.gather(x)
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
