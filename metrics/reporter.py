"""One record a step and one for each event, sent to every sink; and the line that people read."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from metrics.sinks import Console, JsonLines, Wandb, finite_record
from metrics.throughput import format_duration


@dataclass
class Reporter:
    """Sends records to the terminal, metrics.jsonl and W&B."""

    console: Console
    """Terminal and log.txt."""
    lines: JsonLines
    """metrics.jsonl."""
    wandb: Wandb
    """W&B, possibly disabled."""
    attempt: int
    """How many times this run has been started."""
    first_step: int
    """Steps done before this start."""
    last_step: int
    """Where this start will stop."""
    began: float = field(default_factory=time.perf_counter)
    """When this start's first step began, by time.perf_counter."""

    def step(self, record: dict[str, Any]) -> None:
        """Record one step; keys as in the contract of metrics.jsonl."""
        pace = (time.perf_counter() - self.began) / (record["step"] - self.first_step)
        self.console.say(step_line(record, self.last_step, (self.last_step - record["step"]) * pace))
        self._send({"step": record["step"], "attempt": self.attempt} | record)

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        """Record an event and say it."""
        self.console.say(text)
        self._send({"event": kind, "step": step, "attempt": self.attempt} | values)

    def _send(self, record: dict[str, Any]) -> None:
        clean = finite_record(record)
        self.lines.write(clean)
        self.wandb.write(clean)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close every sink but the console; W&B learns how the run ended."""
        self.lines.close()
        self.wandb.close(0 if error is None else getattr(error, "exit_code", 1))


def step_line(record: dict[str, Any], last_step: int, seconds_left: float) -> str:
    """The one line a step."""
    waited = record["time"]["data"] / record["step_time"] if record["step_time"] else 0.0
    skipped = f" | skipped {record['skipped']}" if record["skipped"] else ""
    return (
        f"step {record['step']:>{len(str(last_step))}}/{last_step} | loss {record['loss']:.4f} | "
        f"norm {record['grad_norm']:.3f} | lr {record['lr']:.2e} | {record['tokens_per_s']:,.0f} tok/s | "
        f"mfu {record['mfu']:.0%} | data wait {waited:.0%} | {record['step_time']:.3f} s/step | "
        f"eta {format_duration(seconds_left)}{skipped}"
    )


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held so far: of the device on CUDA, of the process on a CPU; GB (1e9 bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
