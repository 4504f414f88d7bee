"""How much a graph keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def kept_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that run() asks for and that are not given back while its result lives, without the result's own."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = run()
    events = profiled.profiler.kineto_results.events()
    asked: int = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return asked - out.untyped_storage().nbytes()
