"""Cheap activations made again in the backward pass instead of kept for it: outputs of norms and of activations.

Unlike the recomputation of a block no product is made twice, and a dense layer keeps about a third less.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recipe:
    """How to make a tensor anew; made once, however many products read it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        """make: gives the same bits again, and holds only what is kept anyway, detached."""
        self.make = make
        self.made: Tensor | None = None

    @torch.no_grad()
    def tensor(self) -> Tensor:
        """The tensor. A graph drops its recipe after the last product that reads it, and so the tensor."""
        if self.made is None:
            self.made = self.make()
        return self.made

    def instead_of(self, x: Tensor) -> AbstractContextManager[Any]:
        """Inside, autograd keeps this recipe where it would keep x."""
        place, shape = x.data_ptr(), x.shape

        def pack(kept: Tensor) -> Tensor | Recipe:
            return self if kept.data_ptr() == place and kept.shape == shape else kept

        def unpack(kept: Tensor | Recipe) -> Tensor:
            return kept.tensor() if isinstance(kept, Recipe) else kept

        return saved_tensors_hooks(pack, unpack)


def recipe(make: Callable[..., Tensor], *args: Tensor) -> Recipe | None:
    """make(*args) later; None in compiled code, where the partitioner decides what is kept."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    kept = [each.detach() for each in args]
    return Recipe(lambda: make(*kept))


def keeping(again: Recipe | None, x: Tensor) -> AbstractContextManager[Any]:
    """Inside, autograd keeps `again` instead of x, if there is any."""
    return nullcontext() if again is None else again.instead_of(x)
