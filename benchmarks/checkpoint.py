"""What a checkpoint costs: python -m benchmarks.checkpoint [--mb 500] [--rounds 7] [--dir DIR] [--json FILE]

All in one run, in turns, medians; ratios are to the bare operations on as many bytes:

    held          what an asynchronous save holds training up for / one copy of the state into warm memory
    synchronous   os.write + fsync of the bytes / a synchronous save (hashing and commit included; the checkpoint
                  that does not stay is removed while training goes on)
    load          a plain read of the bytes / a load, checked
    slowdown      steps of training while a save is written / steps without
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import store
from checkpoint.folder import Folders
from checkpoint.pieces import Piece, whole
from checkpoint.run_state import RunState
from checkpoint.saver import Saver
from checkpoint.store import Retention
from parallel.process import Everyone

_STATE = RunState(1, 0, 0, 0, data={}, config={}, vocab_size=1)


def state_of(megabytes: int) -> dict[str, Tensor]:
    """Weights and moments of blocks of a model, and small tensors as a model has them."""
    block: dict[str, tuple[int, ...]] = {
        "qkv": (1536, 768),
        "out": (768, 768),
        "gate": (2048, 768),
        "up": (2048, 768),
        "down": (768, 2048),
    }
    block |= {"norm1": (768,), "norm2": (768,)}
    tensors: dict[str, Tensor] = {}
    number = 0
    while sum(t.numel() * 4 for t in tensors.values()) < megabytes * 1e6:
        for name, shape in block.items():
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                tensors[f"{kind}.layers.{number}.{name}"] = torch.randn(shape)
        number += 1
    return tensors


def timed(act: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Bench:
    """The state, and each thing that is measured."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.tensors, self.folder = state_of(megabytes), folder
        self.pieces: dict[str, Piece] = {name: whole(tensor) for name, tensor in self.tensors.items()}
        self.size = sum(tensor.numel() * 4 for tensor in self.tensors.values())
        self.flat, self.warm = torch.randn(self.size // 4), torch.zeros(self.size // 4)
        self.saver = Saver(Folders(folder / "asynchronous"), Everyone(), Retention(1), True, self.pieces)
        self.waiting_saver, self.step_number = (
            Saver(Folders(folder / "synchronous"), Everyone(), Retention(1), False),
            0,
        )
        self.operand = torch.randn(512, 512)

    def copy(self) -> float:
        """One copy of the bytes into warm memory."""
        return timed(lambda: self.warm.copy_(self.flat))

    def write(self, path: Path) -> None:
        """os.write and fsync of the bytes."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        memory = self.flat.view(torch.uint8).numpy().data
        for begin in range(0, len(memory), 16 << 20):
            os.write(handle, memory[begin : begin + (16 << 20)])
        os.fsync(handle)
        os.close(handle)

    def have_memory(self) -> None:
        """Have as much free memory at hand as a file takes in the page cache. A virtual machine's host takes back what
        was free for seconds, and gives it again ten times as slowly as it is written to: whoever writes first pays."""
        path = self.folder / "passing"
        self.write(path)
        path.unlink()

    def raw_write(self) -> float:
        """os.write and fsync of the bytes."""
        path = self.folder / "raw"
        path.unlink(missing_ok=True)
        self.have_memory()
        return timed(lambda: self.write(path))

    def raw_read(self) -> float:
        """A plain read of the bytes into warm memory."""
        memory = self.warm.view(torch.uint8).numpy().data
        with (self.folder / "raw").open("rb", buffering=0) as file:
            return timed(lambda: file.readinto(memory))

    def synchronous(self) -> float:
        """A save that training waits for."""
        self.step_number += 1
        state = replace(_STATE, step=self.step_number)
        self.have_memory()
        seconds = timed(lambda: self.waiting_saver.save(self.pieces, state, files={}))
        self.waiting_saver.wait_for_removals()
        return seconds

    def load(self) -> float:
        """Reading it back, checked, into the tensors."""
        path = self.folder / "synchronous" / f"step_{self.step_number:08d}"
        return timed(lambda: store.load(path, self.pieces))

    def step(self) -> float:
        """What stands for training: products and passes over memory."""

        def act() -> None:
            for _ in range(20):
                self.operand @ self.operand
            self.flat[: 1 << 22].add_(1.0)

        return timed(act)

    def asynchronous(self) -> tuple[float, float, float, float]:
        """held, a step while writing, a step without, seconds until it is whole."""
        quiet = statistics.median(self.step() for _ in range(20))
        held = timed(lambda: self.saver.save(self.pieces, _STATE, files={}))
        steps = []
        outcome = None
        while outcome is None:
            steps.append(self.step())
            outcome = self.saver.outcome()
        if outcome.error is not None:
            raise outcome.error
        return held, statistics.median(steps), quiet, outcome.seconds


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """Medians over rounds; the first one warms up."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        held, busy, quiet, seconds = bench.asynchronous()
        each = {
            "copy": bench.copy(), "held": held, "raw_write": bench.raw_write(), "synchronous": bench.synchronous(),
            "raw_read": bench.raw_read(), "load": bench.load(), "step_busy": busy, "step_quiet": quiet,
            "asynchronous": seconds,
        }  # fmt: skip
        for key, value in each.items() if number else ():
            found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where to write (default: the system's scratch folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        bench = Bench(options.mb, Path(scratch))
        seconds = measure(bench, options.rounds)
    ratios = {
        "held": seconds["held"] / seconds["copy"], "synchronous": seconds["raw_write"] / seconds["synchronous"],
        "load": seconds["raw_read"] / seconds["load"], "slowdown": seconds["step_busy"] / seconds["step_quiet"],
    }  # fmt: skip
    print(f"{bench.size / 1e6:.0f} MB in {len(bench.tensors)} tensors, medians of {options.rounds} rounds")
    for name, value in seconds.items():
        print(f"  {name:<14} {value * 1e3:9.1f} ms")
    for name, value in ratios.items():
        print(f"  {name:<14} {value:9.2f}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
