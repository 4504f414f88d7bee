"""Where in the project a step makes the host wait for a CUDA device: each is a hole in the device's work."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
OUTSIDE = "outside the project"


@contextmanager
def recorded_waits() -> Iterator[Counter[str]]:
    """Inside, CUDA operations that wait are counted by place. PyTorch knows of most of them, not of all."""
    found: Counter[str] = Counter()
    show = warnings.showwarning

    def note(message: Warning | str, *where: Any, **to: Any) -> None:
        if "called a synchronizing" in str(message):
            found[project_place(traceback.extract_stack())] += 1
        else:
            show(message, *where, **to)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def wait_words(places: Counter[str]) -> str:
    """The places and how often, most often first; empty where there was none."""
    return ", ".join(f"{place} ({count})" for place, count in places.most_common())


def project_place(stack: traceback.StackSummary) -> str:
    """The innermost line of the project itself, such as `engine.py:213 in _one`; gpu_check's own do not count."""
    for frame in reversed(stack):
        path = Path(frame.filename)
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
        own = path.name.startswith("gpu_") or path == Path(__file__)
        if inside is not None and not inside.parts[0].startswith(".") and not own:
            return f"{inside}:{frame.lineno} in {frame.name}"
    return OUTSIDE
