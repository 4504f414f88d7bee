"""How fast is one training step? Beside transformers (and litgpt where installed), and as a share of the limit.

python -m benchmarks.step [--precision bf16|fp32] [--compile] [--rounds 10]

Each contender is a process of its own, with its own allocator and settings. They take turns in an order drawn anew
every round, so that whatever else the machine does falls on all alike; a turn is a step that brings the contender's
data back into the caches, then three that are timed, as in training. Others' work only ever adds time, so a
contender's quiet steps are the fastest third of its own; figures are their medians, and the median of all steps
stands beside them. Memory is the most that was resident in two steps, over what was before the model was made.

`gemm` is the limit: the products of the linears alone, each in its fastest form. `gemm as trained` has the forms in
which a backward pass finds its operands.
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
_LIMITS = ("gemm", "gemm as trained")


@dataclass
class Contender:
    """A worker process and the steps it has made."""

    name: str
    """Name in the table."""
    process: subprocess.Popen[str]
    """The worker."""
    first_step: float = 0.0
    """Seconds of the first step, compilation included."""
    memory_gb: float = 0.0
    """Most resident memory of the first two, over that before."""
    samples: list[float] = field(default_factory=list)
    """Seconds of each step."""

    def step(self) -> float:
        """Seconds of one step made now."""
        pipe = cast(IO[str], self.process.stdin)
        pipe.write("go\n")
        pipe.flush()
        return self.answer("seconds")

    def answer(self, what: str) -> float:
        """The next figure of a kind that the worker tells; other lines are libraries' talk."""
        for line in cast(IO[str], self.process.stdout):
            if line.startswith(f"{what} "):
                return float(line.split()[1])
        raise SystemExit(f"{self.name} ended: run `python -m benchmarks.step_workers` with its name to see why")

    @property
    def quiet(self) -> float:
        """Median of the fastest third of the steps, in seconds."""
        return statistics.median(sorted(self.samples)[: math.ceil(len(self.samples) / 3)])


def contender_names(compiled: bool, precision: str) -> list[str]:
    """Everyone who takes part."""
    bases = ["tatara", "transformers"] + (["litgpt"] if importlib.util.find_spec("litgpt") else [])
    names = [*bases, "transformers, memory kept"]
    if precision != "fp32":
        names.append("transformers, fp32 masters")
    if compiled:
        names += [f"{base} compiled" for base in bases] + ["transformers compiled, memory kept"]
    return [*names, *_LIMITS]


def start(name: str, options: argparse.Namespace) -> Contender:
    """Start a worker and wait until it is warm."""
    command = [sys.executable, "-m", "benchmarks.step_workers", name, options.precision, str(options.threads)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    contender = Contender(name, process)
    contender.first_step = contender.answer("seconds")
    contender.memory_gb = contender.answer("memory")
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
        f"\n{'':36s} {'tokens/s':>9s} {'GFLOP/s':>8s} {'of GEMM':>8s} {'s/step':>7s} {'first':>6s} "
        f"{'all steps':>9s} {'GB':>6s}"
    )
    for c in contenders:
        limit = c.name in _LIMITS
        rate = (gemm_flops if limit else flops) / medians[c.name]
        tokens = "" if limit else f"{TOKENS / medians[c.name]:,.0f}"
        print(
            f"{c.name:36s} {tokens:>9s} {rate / 1e9:8.0f} {rate / peak:8.1%} {medians[c.name]:7.3f} "
            f"{c.first_step:6.1f} {statistics.median(c.samples):9.3f} {c.memory_gb:6.2f}"
        )
    return medians


def ratios(contenders: list[Contender]) -> dict[str, float]:
    """How many times the tokens/s of each other one ours makes, in what share of its memory; print and return."""
    found: dict[str, float] = {}
    by_name = {each.name: each for each in contenders if each.name not in _LIMITS}
    for name in ("tatara", "tatara compiled"):
        for other in by_name.values():
            if name in by_name and not other.name.startswith("tatara"):
                speed = other.quiet / by_name[name].quiet
                memory = by_name[name].memory_gb / other.memory_gb
                print(f"{name + ' / ' + other.name:60s} {speed:.2f} x  memory {memory:.2f}")
                found |= {f"{name} / {other.name}": speed, f"{name} / {other.name}: memory": memory}
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
    for name in contender_names(options.compile, options.precision):
        contenders.append(start(name, options))
        print(f"{name}: warm after a first step of {contenders[-1].first_step:.1f} s", flush=True)
    measure(contenders, options.rounds)
    medians = table(contenders)
    found = ratios(contenders)
    if options.json:
        options.json.write_text(json.dumps({"seconds": medians, "ratios": found}, indent=1) + "\n")
    for contender in contenders:
        contender.process.kill()


if __name__ == "__main__":
    main()
