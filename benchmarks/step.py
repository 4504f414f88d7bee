"""How fast is one training step? Beside transformers (and litgpt where installed), and as a share of the limit.

python -m benchmarks.step [--precision bf16|fp32] [--compile] [--rounds 24]

Each contender is a process of its own, with its own allocator and settings; they take turns, one step each, so
that whatever else the machine does falls on all. Before and after each step a fixed product is timed, which tells
how busy the machine was with others' work: medians are over each contender's quiet steps, the third of them whose
slower product was fastest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import torch

from benchmarks.step_workers import BATCH, SEQ_LEN, SHAPE, TOKENS, gemm_shapes
from model.flops import step_flops


@dataclass
class Contender:
    """A worker process and the steps it has made."""

    name: str
    """Name in the table."""
    process: subprocess.Popen[str]
    """The worker."""
    first_step: float = 0.0
    """Seconds of the first step, compilation included."""
    samples: list[tuple[float, float]] = field(default_factory=list)
    """(slower probe, step) in seconds."""

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
    def quiet(self) -> list[float]:
        """The third of the steps around which the machine was least busy."""
        return [step for _, step in sorted(self.samples)[: math.ceil(len(self.samples) / 3)]]


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


def probe(x: torch.Tensor) -> float:
    """Seconds of a fixed product that does not depend on any contender."""
    start = time.perf_counter()
    for _ in range(6):
        torch.nn.functional.linear(x, x)
    return time.perf_counter() - start


def measure(contenders: list[Contender], rounds: int, precision: str) -> None:
    """Let everyone take turns, with a probe before and after each step."""
    x = torch.ones(1024, 1024, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    probe(x)
    for _ in range(rounds):
        for contender in contenders:
            before = probe(x)
            seconds = contender.step()
            contender.samples.append((max(before, probe(x)), seconds))


def table(contenders: list[Contender]) -> dict[str, float]:
    """Print a line a contender; median seconds of each over its quiet steps."""
    flops = step_flops(SHAPE, TOKENS, BATCH * SEQ_LEN**2)
    gemm_flops = 6 * TOKENS * sum(count * inner * columns for count, inner, columns in gemm_shapes())
    medians = {c.name: statistics.median(c.quiet) for c in contenders}
    peak = gemm_flops / medians["gemm"]
    print(f"\n{'':36s} {'tokens/s':>9s} {'GFLOP/s':>8s} {'of GEMM':>8s} {'s/step':>7s} {'first':>6s}  {'fastest':>8s}")
    for c in contenders:
        rate = (gemm_flops if c.name == "gemm" else flops) / medians[c.name]
        tokens = "" if c.name == "gemm" else f"{TOKENS / medians[c.name]:,.0f}"
        print(
            f"{c.name:36s} {tokens:>9s} {rate / 1e9:8.0f} {rate / peak:8.1%} {medians[c.name]:7.3f} "
            f"{c.first_step:6.1f}  {min(s for _, s in c.samples):8.3f}"
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
    parser.add_argument("--rounds", type=int, default=24, help="steps of each contender (24)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each")
    parser.add_argument("--json", type=Path, help="write medians and ratios here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contenders = []
    for name in contender_names(options.compile):
        contenders.append(start(name, options))
        print(f"{name}: warm after a first step of {contenders[-1].first_step:.1f} s", flush=True)
    measure(contenders, options.rounds, options.precision)
    medians = table(contenders)
    found = ratios(medians)
    if options.json:
        options.json.write_text(json.dumps({"seconds": medians, "ratios": found}, indent=1) + "\n")
    for contender in contenders:
        contender.process.kill()


if __name__ == "__main__":
    main()
