"""One record a step and one for each event, sent to every sink; and the line that people read."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
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
    lines: JsonLines | None
    """metrics.jsonl; None on a process that does not lead."""
    wandb: Wandb | None
    """W&B, possibly disabled; None likewise."""
    attempt: int
    """How many times this run has been started."""
    last_step: int
    """Where this start will stop."""
    total_steps: int
    """Where the run will end."""
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=30))
    """(step, time.perf_counter) of the latest records, for the time that is left."""

    def step(self, record: dict[str, Any]) -> None:
        """Record one step; keys as in the contract of metrics.jsonl."""
        self.recent.append((record["step"], time.perf_counter()))
        (first, began), (step, now) = self.recent[0], self.recent[-1]
        pace = (now - began) / (step - first) if step > first else record["step_time"]
        self.console.say(step_line(record, self.total_steps, (self.last_step - step) * pace))
        self._send({"step": record["step"], "attempt": self.attempt} | record)

    def event(self, kind: str, step: int, text: str, **values: Any) -> None:
        """Record an event and say it."""
        self.console.say(text)
        self._send({"event": kind, "step": step, "attempt": self.attempt} | values)

    def _send(self, record: dict[str, Any]) -> None:
        clean = finite_record(record)
        for sink in (self.lines, self.wandb):
            if sink is not None:
                sink.write(clean)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close every sink but the console; W&B learns how the run ended."""
        if self.lines is not None:
            self.lines.close()
        if self.wandb is not None:
            self.wandb.close(0 if error is None else getattr(error, "exit_code", 1))


def step_line(record: dict[str, Any], total_steps: int, seconds_left: float) -> str:
    """The one line a step; seconds without validation and saving, which have lines of their own."""
    working = record["step_time"] - record["time"]["evaluation"] - record["time"]["checkpoint"]
    waited = record["time"]["data"] / working if working > 0 else 0.0
    waiting = f"data wait {waited:.0%} | " if waited >= 0.01 else ""
    skipped = f" | skipped {record['skipped']}" if record["skipped"] else ""
    loss = f"{record['loss']:{'.4f' if record['loss'] < 1e4 else '.4g'}}"
    return (
        f"step {record['step']:>{len(str(total_steps))}}/{total_steps} | loss {loss} | "
        f"norm {record['grad_norm']:.3f} | lr {record['lr']:.2e} | {record['tokens_per_s']:,.0f} tok/s | "
        f"mfu {record['mfu']:.0%} | {waiting}{working:.3f} s/step | eta {format_duration(seconds_left)}{skipped}"
    )


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held so far: of the device on CUDA, of the process on a CPU; GB (1e9 bytes)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
