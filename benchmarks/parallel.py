"""What a layout costs on two cores: two ranks of one thread each against one process of two threads.

python -m benchmarks.parallel [--precision bf16|fp32] [--rounds N] [--json FILE]

All contenders train the same model on the same tokens, in turns of random order, so that the machine's moods
meet all alike. `halves` are two processes that train half of the batch each and never speak: what two cores
can do without any exchange. What dp2 is below that is the cost of FSDP2; tp2 and pp2 are for memory, not for
two cores, and their ratios say what they cost where they bring no memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from conf.schema import Config, TrainConfig
from data.batch import MicroBatch
from engine import Engine
from launch.spawn import run_ranks
from metrics.clock import StepClock
from model.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.device import set_up_machine
from parallel.layout import layout_of
from parallel.mesh import ONE_PROCESS, make_mesh
from parallel.precision import PrecisionConfig
from parallel.process import joined
from parallel.ranks import Ranks

SHAPE = ModelConfig(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1536, vocab_size=8192)
BATCH, SEQ_LEN = 8, 512
# name: (processes, threads of each, cut, sequences of a micro-batch)
CONTENDERS = {
    "one process": (1, 2, ParallelConfig(), 4),
    "halves": (2, 1, ParallelConfig(), 4),
    "dp2 zero0": (2, 1, ParallelConfig(zero=0), 4),
    "dp2 zero1": (2, 1, ParallelConfig(zero=1), 4),
    "dp2 zero3": (2, 1, ParallelConfig(zero=3), 4),
    "tp2": (2, 1, ParallelConfig(tp=2), 4),
    "pp2 1f1b": (2, 1, ParallelConfig(pp=2), 2),
    "pp2 zbv": (2, 1, ParallelConfig(pp=2, schedule="zbv"), 2),
}


def micro_batches(config: Config, rank: int, ranks: int) -> list[MicroBatch]:
    """This rank's share of the same tokens for all."""
    size, generator = config.train.micro_batch, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SHAPE.vocab_size or 0, (BATCH, SEQ_LEN + 1), generator=generator)
    positions = torch.arange(SEQ_LEN).repeat(size)
    borders = torch.arange(0, size * SEQ_LEN + 1, SEQ_LEN, dtype=torch.int32)
    return [
        MicroBatch(
            tokens[first : first + size, :-1].reshape(-1), tokens[first : first + size, 1:].reshape(-1), positions,
            borders, range(first, first + size),
        )
        for first in range(rank * size, BATCH, ranks * size)
    ]  # fmt: skip


def timed_steps(ranks: Ranks, name: str, precision: str, threads: int, steps: int) -> list[float]:
    """Seconds of each step of one contender, after one that is not counted."""
    _, _, parallel, size = CONTENDERS[name]
    apart = name == "halves"
    config = Config(
        train=TrainConfig(steps=100, global_batch=BATCH // 2 if apart else BATCH, micro_batch=size, seq_len=SEQ_LEN),
        model=SHAPE, precision=PrecisionConfig("bf16" if precision == "bf16" else "fp32"), parallel=parallel,
    )  # fmt: skip
    config = replace(config, data=replace(config.data, document_mask=False))
    device = torch.device("cpu")
    with joined(ranks, device, 600) as everyone:
        machine = set_up_machine("cpu", 0, threads, 1, config.precision, 1.0, None, lambda _: None)
        mesh = ONE_PROCESS if apart else make_mesh(layout_of(parallel, ranks.world), ranks.rank, device, 600)
        engine = Engine(config, SHAPE, mesh, machine, StepClock(device))
        batches = micro_batches(config, mesh.dp_rank, mesh.layout.dp)[: engine.micro_batches]
        seconds = []
        for _ in range(steps + 1):
            everyone.barrier()
            began = time.perf_counter()
            engine.step(batches, BATCH * SEQ_LEN, 1e-4)
            everyone.barrier()
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def measure(precision: str, rounds: int, steps: int) -> dict[str, float]:
    """Median seconds of a step by contender, of the fastest third of its steps."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(CONTENDERS), len(CONTENDERS)):
            world, threads, _, _ = CONTENDERS[name]
            taken = run_ranks(timed_steps, world, name, precision, threads, steps, timeout=600, threads=threads)
            seconds[name] += [max(of_ranks) for of_ranks in zip(*taken, strict=True)]
            print(f"round {turn + 1}/{rounds}: {name:<12} {min(seconds[name]):.3f} s/step at best", flush=True)
    return {name: statistics.median(sorted(all_)[: max(1, len(all_) // 3)]) for name, all_ in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each contender (4)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a turn (4)")
    parser.add_argument("--json", type=Path, help="write medians here")
    options = parser.parse_args()
    medians = measure(options.precision, options.rounds, options.steps)
    one = medians["one process"]
    print(f"\n{options.precision}, {BATCH} x {SEQ_LEN} tokens a step      tokens/s  of one process")
    for name, seconds in medians.items():
        print(f"{name:<40} {BATCH * SEQ_LEN / seconds:>8,.0f}  {one / seconds:>14.2f}")
    halves = medians["halves"]
    for name in ("dp2 zero0", "dp2 zero1", "dp2 zero3"):
        print(f"cost of FSDP2 under {name}: {medians[name] / halves - 1:.0%} of a step without exchange")
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
