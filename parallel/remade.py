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

    def __init__(self, of: Tensor, make: Callable[[], Tensor]) -> None:
        """make: gives the bits of `of` again, and holds only what is kept anyway, detached."""
        self.place, self.shape, self.make = of.data_ptr(), of.shape, make
        self.made: Tensor | None = None

    @torch.no_grad()
    def tensor(self) -> Tensor:
        """The tensor. A graph drops its recipe after the last product that reads it, and so the tensor."""
        if self.made is None:
            self.made = self.make()
        return self.made

    def pack(self, kept: Tensor) -> Recipe | tuple[Tensor, int]:
        """What autograd keeps; the tensor itself is known by its place, as long as it lives."""
        if kept.data_ptr() == self.place and kept.shape == self.shape:
            return self
        return kept, kept._version


def recipe(of: Tensor, make: Callable[..., Tensor], *args: Tensor) -> Recipe | None:
    """`of` = make(*args) later; None in compiled code, where the partitioner decides what is kept."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    kept = [each.detach() for each in args]
    return Recipe(of, lambda: make(*kept))


def keeping(again: Recipe | None) -> AbstractContextManager[Any]:
    """Inside, autograd keeps `again`, if there is any, where it would keep the tensor that it makes."""
    return nullcontext() if again is None else saved_tensors_hooks(again.pack, _unpack)


def _unpack(kept: Recipe | tuple[Tensor, int]) -> Tensor:
    if isinstance(kept, Recipe):
        return kept.tensor()
    tensor, version = kept
    if tensor._version != version:  # autograd does not look where hooks are
        shape = tuple(tensor.shape)
        raise RuntimeError(f"a tensor {shape} that the backward pass needs was changed after the forward pass")
    return tensor
