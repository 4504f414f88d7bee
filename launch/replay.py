"""python -m launch.replay RUN/faults/step_N: make the micro-batch again that went wrong, on one process, and say where.

The numbers of a fault of the software or the data go wrong again; those of a faulty device do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint import store
from checkpoint.agreement import Damaged
from checkpoint.manifest import check_small
from checkpoint.run_state import RunState, read_state
from conf.convert import from_dict
from conf.schema import Config
from data.batch import MicroBatch
from engine import Engine
from errors import CheckpointRefused, exit_code_of
from faults import FAULT, REPLAY, batch_of
from metrics.clock import StepClock
from metrics.fault import Fault, from_record
from metrics.inject import Injector
from parallel.config import ParallelConfig
from parallel.device import set_up_machine
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.process import Everyone

_UNREAD = ("optim.", "health.", REPLAY)


def main(argv: list[str] | None = None) -> int:
    """Command line to exit code: 0 if the fault shows again, 1 if all is finite."""
    return exit_code_of(lambda: replay(_options(argv)))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.replay", description=__doc__)
    parser.add_argument("fault", type=Path, help="a folder RUN/faults/step_N")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, whatever the run's precision was")
    return parser.parse_args(argv)


def replay(options: argparse.Namespace) -> int:
    """Make the micro-batch again; tell what was found then and now."""
    path: Path = options.fault
    told, state = _read(path)
    was = from_record(told["fault"])
    config = _alone(from_dict(state.config), state, options.fp32)
    engine = _engine(config, was)
    store.load(path, engine.pieces(), fresh=_unread(config))
    engine.resume(0)
    batch = _batch(path, told, config)
    scale = torch.tensor(told["loss_scale"]) if told["loss_scale"] is not None and engine.loss_scale else None
    print(f"step {state.step} of {path.parent.parent.name}, then: {was.words}")
    now = engine.locate([batch], told["valid_tokens"], Everyone(), scale)
    if now is None:
        print("now: all is finite; what went wrong lay in its device, or in what ranks sent each other")
        return 1
    print(f"now: {now.words}")
    for name, numbers in now.statistics.items():
        print(f"  {name:<16} {numbers.words}")
    return 0


def _read(path: Path) -> tuple[dict[str, Any], RunState]:
    """What fault.json says, and the run's state.

    Raises:
        CheckpointRefused: the folder is something else, or damaged.
    """
    if not (path / FAULT).is_file():
        raise CheckpointRefused(f"{path} holds no {FAULT}; name a folder like runs/NAME/faults/step_00000100")
    check_small(path)
    try:
        told = json.loads((path / FAULT).read_text(encoding="utf-8"))
        return told, read_state(path)
    except ValueError as error:
        raise Damaged(path, path / FAULT, str(error)) from error


def _alone(config: Config, state: RunState, fp32: bool) -> Config:
    """The run's configuration for one process."""
    model = replace(config.model, vocab_size=state.vocab_size)
    precision = replace(config.precision, name="fp32") if fp32 else config.precision
    return replace(config, model=model, precision=precision, parallel=ParallelConfig())


def _engine(config: Config, was: Fault) -> Engine:
    """The whole model, with the fault that debug.inject made, if it did."""
    machine = set_up_machine(
        config.train.device, 0, config.train.threads, 1, config.precision, config.metrics.peak_tflops, None, print
    )  # fmt: skip
    mesh = make_mesh(
        layout_of(config.parallel, 1), 0, machine.device, config.parallel.timeout,
        experts=config.model.moe is not None, maxima=config.precision.name == "fp8_delayed",
    )  # fmt: skip
    engine = Engine(config, config.model, mesh, machine, StepClock(machine.device))
    made = tuple(replace(each, micro_batch=0, rank=0, attempt=None) for each in config.debug.inject)
    injector = Injector(replace(config.debug, inject=made), 0, 1, print)
    for each in made:
        if each.kind == "nan" and f"layers.{each.layer}" == was.module:
            injector.begin_step(each.step)
    injector.poison(engine.layers, lambda: engine.micro_batch)
    return engine


def _unread(config: Config) -> tuple[str, ...]:
    return _UNREAD if config.precision.name == "fp8_delayed" else (*_UNREAD, "fp8.")


def _batch(path: Path, told: dict[str, Any], config: Config) -> MicroBatch:
    return batch_of(store.read_tensors(path, REPLAY), told["first_sample"], config.train.seq_len)


if __name__ == "__main__":
    sys.exit(main())
