"""Python's garbage collection at the same steps on all ranks: the pause of one is a pause of all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting(every: int) -> Iterator[Callable[[int], None]]:
    """Inside, garbage is collected when the function given is told of a step that is a multiple of `every`.

    What is there at the start and after the first step (modules, the model, compiled code) is not looked at again. 0:
    Python collects at times of its own.
    """
    if not every:
        yield lambda step: None
        return

    first = True

    def after(step: int) -> None:
        """Collect, if it is time."""
        nonlocal first
        if first or step % every == 0:
            gc.collect()
        if first:
            gc.freeze()
        first = False

    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield after
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
