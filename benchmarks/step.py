"""How fast is one training step? Beside transformers (and litgpt where installed), and as a share of the limit.

python -m benchmarks.step [--precision bf16|fp32] [--compile] [--rounds 10]

Each contender is a process of its own, with its own allocator and settings. They take turns in an order drawn anew
every round, so that whatever else the machine does falls on all alike; a turn is a step that brings the contender's
data back into the caches, then three that are timed, as in training. Others' work only ever adds time, so a
contender's quiet steps are the fastest third of its own; figures are their medians, and the median of all steps
stands beside them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import torch

from benchmarks.step_workers import BATCH, SEQ_LEN, SHAPE, TOKENS, gemm_shapes
from model.flops import step_flops

_TIMED = 3  # steps of a turn that are timed


@dataclass
class Contender:
    """A worker process and the steps it has made."""

    name: str
    """Name in the table."""
    process: subprocess.Popen[str]
    """The worker."""
    first_step: float = 0.0
    """Seconds of the first step, compilation included."""
    samples: list[float] = field(default_factory=list)
    """Seconds of each step."""

    def step(self) -> float:
        """Seconds of one step made now."""
        pipe = cast(IO[str], self.process.stdin)
        pipe.write("go\n")
        pipe.flush()
        return self.answer()

    def answer(self) -> float:
        """The next time the worker tells; other lines are libraries' talk."""
        for line in cast(IO[str], self.process.stdout):
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"{self.name} ended: run `python -m benchmarks.step_workers` with its name to see why")

    @property
    def quiet(self) -> float:
        """Median of the fastest third of the steps, in seconds."""
        return statistics.median(sorted(self.samples)[: math.ceil(len(self.samples) / 3)])


def contender_names(compiled: bool) -> list[str]:
    """Everyone who takes part."""
    bases = ["tatara", "transformers"] + (["litgpt"] if importlib.util.find_spec("litgpt") else [])
    names = [*bases, "transformers, memory kept"]
    if compiled:
        names += [f"{base} compiled" for base in bases] + ["transformers compiled, memory kept"]
    return [*names, "gemm"]


def start(name: str, options: argparse.Namespace) -> Contender:
    """Start a worker and wait until it is warm."""
    command = [sys.executable, "-m", "benchmarks.step_workers", name, options.precision, str(options.threads)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    contender = Contender(name, process)
    contender.first_step = contender.answer()
    contender.answer()
    return contender


def measure(contenders: list[Contender], rounds: int) -> None:
    """Let everyone take turns."""
    draw = random.Random(0)
    for _ in range(rounds):
        for contender in draw.sample(contenders, len(contenders)):
            contender.step()
            contender.samples += [contender.step() for _ in range(_TIMED)]


def table(contenders: list[Contender]) -> dict[str, float]:
    """Print a line a contender; seconds of each, median of its quiet steps."""
    flops = step_flops(SHAPE, TOKENS, BATCH * SEQ_LEN**2)
    gemm_flops = 6 * TOKENS * sum(count * inner * columns for count, inner, columns in gemm_shapes())
    medians = {c.name: c.quiet for c in contenders}
    peak = gemm_flops / medians["gemm"]
    print(
        f"\n{'':36s} {'tokens/s':>9s} {'GFLOP/s':>8s} {'of GEMM':>8s} {'s/step':>7s} {'first':>6s}  {'all steps':>9s}"
    )
    for c in contenders:
        rate = (gemm_flops if c.name == "gemm" else flops) / medians[c.name]
        tokens = "" if c.name == "gemm" else f"{TOKENS / medians[c.name]:,.0f}"
        print(
            f"{c.name:36s} {tokens:>9s} {rate / 1e9:8.0f} {rate / peak:8.1%} {medians[c.name]:7.3f} "
            f"{c.first_step:6.1f}  {statistics.median(c.samples):9.3f}"
        )
    return medians


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """How many times the tokens/s of each other one ours makes, print and return."""
    found = {}
    for ours in ("tatara", "tatara compiled"):
        for other, seconds in medians.items():
            if ours in medians and not other.startswith(("tatara", "gemm")):
                found[f"{ours} / {other}"] = seconds / medians[ours]
    for pair, value in found.items():
        print(f"{pair:60s} {value:.2f} x")
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile", action="store_true", help="also everyone's compiled form")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender (10)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each")
    parser.add_argument("--json", type=Path, help="write medians and ratios here")
    options = parser.parse_args()
    contenders = []
    for name in contender_names(options.compile):
        contenders.append(start(name, options))
        print(f"{name}: warm after a first step of {contenders[-1].first_step:.1f} s", flush=True)
    measure(contenders, options.rounds)
    medians = table(contenders)
    found = ratios(medians)
    if options.json:
        options.json.write_text(json.dumps({"seconds": medians, "ratios": found}, indent=1) + "\n")
    for contender in contenders:
        contender.process.kill()


if __name__ == "__main__":
    main()
