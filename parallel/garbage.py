"""Python's garbage collection at the same steps on all ranks: the pause of one is a pause of all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting(every: int) -> Iterator[Callable[[int], None]]:
    """Inside, garbage is collected when the function given is told of a step that is a multiple of `every`.

    What is there at the start (modules, the model) is not looked at again. 0: Python collects at times of its own.
    """
    if not every:
        yield lambda step: None
        return

    def after(step: int) -> None:
        if step % every == 0:
            gc.collect()

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
