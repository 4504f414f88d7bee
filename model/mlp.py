"""The feed-forward half of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class MLP(nn.Module):
    """x [T, hidden] -> [T, hidden]: SwiGLU (Shazeer, 2020: silu(gate) * up) or GELU (tanh form)."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        shape = (config.hidden, config.ffn)
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(*shape, bias=config.bias, device=device) if gated else None
        self.up = nn.Linear(*shape, bias=config.bias, device=device)
        self.down = nn.Linear(config.ffn, config.hidden, bias=config.bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
