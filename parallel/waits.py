"""Where in the project a step makes the host wait for a CUDA device: each is a hole in the device's work."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
OUTSIDE = "outside the project"


@contextmanager
def recorded_waits() -> Iterator[Counter[str]]:
    """Inside, CUDA operations that wait are counted by place. PyTorch knows of most of them, not of all."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            found[project_place(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def project_place(stack: traceback.StackSummary) -> str:
    """The innermost line of the project itself, such as `engine.py:213 in _one`; gpu_check's own do not count."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
        own = path.name.startswith("gpu_") or path == Path(__file__)
        if inside is not None and not inside.parts[0].startswith(".") and not own:
            return f"{inside}:{frame.lineno} in {frame.name}"
    return OUTSIDE
