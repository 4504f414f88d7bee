"""Garbage is collected on schedule, and a step leaves none that holds memory."""

from __future__ import annotations

import gc

import pytest
import torch

from parallel.garbage import collecting
from parallel.precision import PrecisionConfig
from tests.parallel.test_waits import DENSE, MIXTURE, engine_on_meta, one_step


def test_collections_are_made_after_the_first_step_and_at_multiples_and_python_is_left_as_it_was(monkeypatch):
    collections: list[str] = []
    counts: list[int] = []
    with collecting(5) as after:
        assert not gc.isenabled()
        monkeypatch.setattr(gc, "collect", lambda: collections.append("one"))
        for step in range(1, 12):
            after(step)
            counts.append(len(collections))
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_after_an_error_python_collects_again():
    with pytest.raises(RuntimeError), collecting(5):
        raise RuntimeError
    assert gc.isenabled()


def test_at_0_python_goes_on_by_itself():
    with collecting(0) as after:
        assert gc.isenabled()
        after(1)


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensors_of_a_step_go_without_a_collection(shape, recompute):
    """Else those of many steps would pile up between two collections."""
    engine = engine_on_meta(shape, PrecisionConfig("bf16"), recompute)
    with collecting(1000):
        one_step(engine)
        before = tensors()
        for _ in range(3):
            one_step(engine)
        assert tensors() == before


def tensors() -> int:
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
