"""torch.compile by regions: one graph serves every block, another the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from model.loss import chunk_terms
from model.transformer import Decoder


def compile_regions(model: Decoder, device: torch.device) -> None:
    """Compile each block in place, and the loss's inner part on CUDA; the first step of each shape is slow.

    On a CPU the loss goes by rows that fit the cache, which beats the compiled form three times over.
    """
    model.compiled = True
    # torch 2.13's pattern for attention matches the blocked form without gradients and gets its shapes wrong;
    # the one for addmm takes the residual's addition out of the norm's loop, where it costs nothing.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"pattern_matcher": device.type != "cpu"}
    for block in model.blocks:
        block.compile(options=options)
    if device.type == "cuda":
        model.loss_terms = torch.compile(chunk_terms, options=options)
