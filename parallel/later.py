"""Gradients of weights that a pipeline schedule asks for later than the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Later = tuple[nn.Parameter, Callable[[], Tensor]]
"""A weight, and what makes its gradient."""


@dataclass
class LaterGradients:
    """Gradients of weights, put off until a pipeline schedule asks for them."""

    waiting: list[Later] = field(default_factory=list)
    """In the order of the backward pass."""

    def take(self) -> list[Later]:
        """What has gathered since the last call."""
        taken, self.waiting = self.waiting, []
        return taken

    @staticmethod
    @torch.no_grad()
    def run(gradients: list[Later]) -> None:
        """Make each and add it to its weight's gradient."""
        for weight, make in gradients:
            made = make().to(weight.grad_dtype or weight.dtype)
            weight.grad = made if weight.grad is None else weight.grad.add_(made)
