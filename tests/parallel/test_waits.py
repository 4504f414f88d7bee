"""No step makes the host wait for the device, and where one does it is told by its place."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch

from conf.schema import Config, TrainConfig
from data.batch import MicroBatch
from engine import Engine
from metrics.clock import StepClock
from model.config import ModelConfig, MoEConfig
from optim.config import OptimConfig
from parallel.device import Machine
from parallel.expert import Dispatched, Pairs
from parallel.mesh import ALONE, ONE_PROCESS
from parallel.precision import PrecisionConfig
from parallel.waits import ROOT, project_place, recorded_waits

META = torch.device("meta")
Recompute = Literal["none", "selective", "full"]
DENSE = ModelConfig(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab_size=100, z_loss=1e-4)
MIXTURE = replace(DENSE, moe=MoEConfig(experts=4, top_k=2, ffn=128, shared_ffn=128, balance="bias"))


def engine_on_meta(shape: ModelConfig, precision: PrecisionConfig, recompute: Recompute = "none") -> Engine:
    """An engine whose tensors have no values: whatever reads one breaks, as on a GPU it would wait."""
    train = TrainConfig(steps=3, global_batch=4, micro_batch=2, seq_len=32, recompute=recompute)
    config = Config(model=shape, train=train, precision=precision, optim=OptimConfig(lr=1e-3))
    compute = {"fp32": torch.float32, "fp16": torch.float16}.get(precision.name, torch.bfloat16)
    machine = Machine(META, compute, torch.float32, "highest", 1.0, measured=False)
    engine = Engine(config, shape, ONE_PROCESS, machine, StepClock(torch.device("cpu")))
    setattr(engine.updater.adamw, "step", lambda: None)  # noqa: B010  # PyTorch's fused kernel is not for this device
    return engine


def micro_batch(documents: int) -> MicroBatch:
    tokens, positions = torch.arange(64) % 50, torch.arange(64) % (64 // documents)
    borders = torch.arange(0, 65, 64 // documents, dtype=torch.int32)
    return MicroBatch(tokens, tokens, positions, borders, range(2))


def one_step(engine: Engine) -> None:
    engine.step([micro_batch(4), micro_batch(8)], 128, 1e-3)


RECIPES = ("fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8")
# Only bf16 has grouped products; elsewhere experts take turns, by counts that the host must know.
CASES = [*((DENSE, recipe) for recipe in RECIPES), (MIXTURE, "bf16")]


@pytest.mark.parametrize("shape, precision", CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_step_reads_nothing_of_the_device(shape, precision):
    for recompute in get_args(Recompute):
        engine = engine_on_meta(shape, PrecisionConfig(precision), recompute)
        for _ in range(2):
            one_step(engine)


def test_rows_of_many_ranks_are_sorted_without_a_look_at_them():
    rows, counts = torch.empty(10, 4, device=META), torch.empty(2, 3, dtype=torch.int64, device=META)
    pairs = Pairs(*(torch.empty(5, dtype=torch.int64, device=META) for _ in range(4)))
    sent = Dispatched(rows, rows[:, 0], pairs, ALONE, [5, 5], [5, 5], counts, [])
    assert [len(each) for each in sent.orders] == [10, 10]


def test_reading_a_loss_within_a_step_would_be_seen(monkeypatch):
    begin = Engine._one

    def reading(self, *given, **named):
        begin(self, *given, **named)
        self.feed.sums[-1].cross_entropy.item()

    monkeypatch.setattr(Engine, "_one", reading)
    with pytest.raises(RuntimeError, match="item"):
        one_step(engine_on_meta(DENSE, PrecisionConfig("bf16")))


def test_places_outside_the_project_and_of_the_script_itself_do_not_count():
    frames = [
        traceback.FrameSummary(str(ROOT / "engine.py"), 7, "_one", line=""),
        traceback.FrameSummary(str(ROOT / "benchmarks" / "gpu_sections.py"), 1, "step", line=""),
        traceback.FrameSummary(str(ROOT / ".venv" / "torch.py"), 2, "item", line=""),
    ]
    assert project_place(traceback.StackSummary.from_list(frames)) == "engine.py:7 in _one"
    assert project_place(traceback.StackSummary.from_list(frames[1:])) == "outside the project"


def test_waits_are_counted_by_place_and_other_warnings_are_not(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with recorded_waits() as places:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [name.split(":")[0] for name in places] == ["tests/parallel/test_waits.py"]
    assert places.total() == 2 and modes == ["warn", "default"]
