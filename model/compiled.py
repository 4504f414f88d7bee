"""torch.compile by regions: one graph serves every block, another the loss."""

from __future__ import annotations

import torch

from model.loss import chunk_terms
from model.transformer import Decoder


def compile_regions(model: Decoder) -> None:
    """Compile each block in place and the loss's inner part; the first step of each shape is slow."""
    for block in model.layers:
        block.compile()
    model.loss_terms = torch.compile(chunk_terms)
