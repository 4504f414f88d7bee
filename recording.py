"""What is recorded of a run's steps: where it stands, and one record of the steps since the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from conf.schema import Config
from data.batch import StepBatch
from data.samples import Samples
from engine import Agreed, Engine, StepSums
from metrics.clock import StepClock
from metrics.reporter import peak_memory_gb
from metrics.throughput import throughput
from model.balance import losses, summary
from model.config import ModelConfig
from model.flops import recomputed_flops, step_flops
from optim.updater import StepOutcome
from parallel.device import Machine
from parallel.process import Everyone


@dataclass
class Progress:
    """Where the run stands."""

    step: int = 0
    """Steps done, skipped ones included."""
    samples: int = 0
    """Sequences seen: the data cursor."""
    tokens: int = 0
    """Tokens seen."""
    skipped: int = 0
    """Steps of this start that changed nothing."""
    skipped_in_a_row: int = 0
    """Those of them since the last good step."""
    hopeless_in_a_row: int = 0
    """Of those again, the ones that lowered no loss scale: what train.max_skips counts."""


@dataclass(frozen=True)
class Done:
    """A step that has been made; its numbers may still be on the device."""

    step: int
    """Its number."""
    batch: StepBatch
    """What this process read."""
    agreed: Agreed
    """What all processes knew of it."""
    sums: StepSums
    """Of its losses, on this process."""
    outcome: StepOutcome
    """What became of it."""
    lr: float
    """Its learning rate."""


class _Unrecorded(NamedTuple):
    """What was trained on since the last record."""

    steps: int = 0
    """Steps, passed-over ones left out."""
    tokens: int = 0
    """Tokens of them."""
    pairs: int = 0
    """Squared lengths of their attention segments, summed."""


class Recorder:
    """Adds up what the steps since the last record read, and makes the record."""

    def __init__(
        self, config: Config, shape: ModelConfig, engine: Engine, samples: Samples, clock: StepClock, machine: Machine,
        everyone: Everyone,
    ) -> None:  # fmt: skip
        self.config, self.shape, self.engine, self.samples = config, shape, engine, samples
        self.clock, self.machine, self.everyone, self.peak = clock, machine, everyone, machine.peak
        self.unrecorded = _Unrecorded()

    def count(self, done: Done) -> None:
        """Add a step that was trained on."""
        steps, tokens, pairs = self.unrecorded
        read = len(done.batch.samples) * self.config.train.seq_len
        self.unrecorded = _Unrecorded(steps + 1, tokens + read, pairs + done.agreed.pairs)

    def forget(self) -> None:
        """What was counted since the last record is of steps that the run has gone back before."""
        self.unrecorded = _Unrecorded()

    def record(
        self, progress: Progress, done: Done, fp8_watched: bool
    ) -> tuple[dict[str, Any], float, dict[str, float]]:
        """Read the device: the record of a step; seconds since the last record, and their parts."""
        steps = self.unrecorded.steps
        loss, z_square = (each / max(1, done.agreed.valid_tokens) for each in self.engine.everywhere(done.sums))
        norm = done.outcome.grad_norm.item()
        seconds, parts = self.clock.finish()
        record = {
            "step": progress.step, "loss": loss, "aux": {}, "grad_norm": norm, "lr": done.lr,
            "tokens": progress.tokens, "samples": progress.samples,
            **self._speed(seconds - parts["evaluation"] - parts["checkpoint"]), "step_time": seconds / steps,
            "time": {name: part / steps for name, part in parts.items()},
            "memory_gb": peak_memory_gb(self.machine.device), "skipped": progress.skipped,
            **self._parts(progress, done, z_square, fp8_watched),
        }  # fmt: skip
        self.unrecorded = _Unrecorded()
        return record, seconds, parts

    def _speed(self, working: float) -> dict[str, float]:
        """Tokens a second and shares of the peak, over the seconds that no saving and no validation took."""
        config, world = self.config, self.everyone.world
        _, tokens, pairs = self.unrecorded
        needed = step_flops(self.shape, tokens, pairs)
        again = recomputed_flops(self.shape, tokens, pairs, config.train.recompute, config.train.recompute_n)
        if self.machine.measured:  # by a busy machine, perhaps: no step is faster than the peak
            self.peak = max(self.peak, (needed + again) / working / world)
        speed = throughput(tokens, needed, again, working, self.peak * world)
        return {"tokens_per_s": speed.tokens_per_s, "mfu": speed.mfu, "hfu": speed.hfu}

    def _parts(self, progress: Progress, done: Done, z_square: float, fp8_watched: bool) -> dict[str, Any]:
        """What only some runs have: other losses, experts, several sources, context parallelism, loss scales."""
        model, batch, outcome = self.config.model, done.batch, done.outcome
        aux = {"z_loss": model.z_loss * z_square} if model.z_loss else {}
        routed = self.engine.balance.records(len(batch.samples) * self.config.train.seq_len)
        if model.moe is not None:
            aux |= losses(routed, model.moe)
        imbalance = self.engine.imbalance(batch.micro_batches)
        several = len(self.config.data.sources) > 1
        return {
            "aux": aux,
            **({"epochs": self.samples.epochs(progress.samples)} if several else {}),
            **({"moe": summary(routed)} if routed else {}),
            **({"cp_imbalance": imbalance} if imbalance is not None else {}),
            **({"fp8": self.engine.fp8_health(self.everyone)} if fp8_watched else {}),
            **({"loss_scale": outcome.loss_scale[0].item()} if outcome.loss_scale else {}),
        }
