"""The typed tree of every setting; each part's dataclass stands beside its consumer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoint.config import CheckpointConfig
from data.config import DataConfig, RampConfig, StepRange
from metrics.config import MetricsConfig
from metrics.health_config import HealthConfig
from metrics.inject_config import DebugConfig
from model.config import ModelConfig
from optim.config import OptimConfig, ScheduleConfig
from parallel.config import ParallelConfig
from parallel.precision import PrecisionConfig


@dataclass(frozen=True)
class RunConfig:
    """Which run this is."""

    name: str | None = None
    """Name of the run and of its directory; null: model, data and 8 hex digits of the training config."""
    dir: str = "runs"
    """Folder that holds the runs' directories."""
    seed: int = 1234
    """Seed of the initial weights and of the data order."""


@dataclass(frozen=True)
class TrainConfig:
    """How long and in what portions."""

    steps: int | None = None
    """Optimizer steps of the whole run; give this or tokens."""
    tokens: int | None = None
    """Tokens of the whole run, rounded down to whole steps; give this or steps."""
    stop_at: int | None = None
    """Step at which this process stops early, with a checkpoint; the schedule still ends at steps."""
    global_batch: int = 8
    """Sequences a step."""
    batch_ramp: tuple[RampConfig, ...] = ()
    """Smaller batches at the beginning, portion after portion: [{tokens: N, global_batch: N}]; then global_batch."""
    skip_steps: tuple[StepRange, ...] = ()
    """Steps whose data is passed over untrained, to get past a spike: [{first: N, last: N}]."""
    micro_batch: int = 0
    """Sequences a forward pass on each rank; changes speed and memory, never the training; 0: the most, up to
    8,192 tokens on a rank, that the layout allows."""
    seq_len: int = 256
    """Tokens a sequence."""
    eval_every: int = 50
    """Steps between validations; 0: none. There is always one at the end unless this is 0."""
    eval_samples: int = 128
    """Held-out sequences a validation reads (all, if there are fewer)."""
    sample_prompt: str | None = None
    """Text that the finished model continues for a few lines, where one process has all of it; null: no sample."""
    max_skips: int = 10
    """Non-finite steps in a row after which the run stops with exit code 4; under fp16, those at the least loss
    scale."""
    max_hours: float | None = None
    """Hours after which this start saves and ends (exit code 75), as before a job's time limit; null: none."""
    gc_every: int = 50
    """Steps between collections of Python's garbage, on all ranks at the same time; 0: at each process's own times."""
    compile: bool = False
    """Compile each block and the loss with torch.compile; slow start, faster steps."""
    recompute: Literal["none", "selective", "full", "every_n"] = "none"
    """Activations made again in the backward pass, to save memory: selective the attention's core, full each block,
    every_n one block in recompute_n."""
    recompute_n: int = 2
    """With recompute=every_n, one block in so many is made again."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where it works."""
    threads: int | None = None
    """CPU threads of each process; null: the cores it may use, shared among the processes that torchrun starts here."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run."""

    run: RunConfig = field(default_factory=RunConfig)
    """Name, place and seed."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batch."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus and tokenizer."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Cut over processes."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the run."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Reporting."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Watching over the run."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Faults made on purpose."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Free notes of your own (`+extra.note=...`); recorded, never read."""
