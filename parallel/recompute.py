"""Activations made again in the backward pass instead of being kept (Chen et al., 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from parallel.fp8.state import FP8


def recomputed(function: Callable[..., Any], *args: Any, fp8: FP8 | None = None) -> Any:
    """function(*args), of which nothing but the arguments is kept; a second pass has the scales of the first."""
    if fp8 is None:  # Dynamo takes no other contexts than the usual ones
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=fp8.recomputing)
