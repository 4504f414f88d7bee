"""Rules of saving, resuming, watching and of faults made on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from conf.problem import Problem, show
from conf.resolve import flatten, run_directory, total_steps
from conf.schema import Config
from conf.suggest import close, did_you_mean
from conf.tree import leaves
from metrics.inject_config import InjectConfig


def _resuming(config: Config) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    meant = close(resume, ("auto", "none"))
    if not resume.strip() or (resume not in ("auto", "none") and meant and not Path(resume).exists()):
        rule = "must be auto, none, or the path of a checkpoint"
        yield Problem("checkpoint.resume", show(resume), rule, f"write checkpoint.resume={(meant or ['auto'])[0]}")
    known = [*leaves(), *flatten(config)]
    for pattern in config.checkpoint.allow:
        if not any(fnmatchcase(key, pattern) for key in known):
            hint = did_you_mean(pattern, known)
            rule = f"`{pattern}` is not a key" + (f"; {hint}" if hint else "")
            fix = "name keys in full, such as optim.lr, or with a star: optim.*"
            yield Problem("checkpoint.allow", show(config.checkpoint.allow), rule, fix)


def _loading(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        if checkpoint.load_except:
            rule = "says which weights checkpoint.load may leave out, but nothing is loaded"
            yield Problem(
                "checkpoint.load_except",
                show(checkpoint.load_except),
                rule,
                "add checkpoint.load=PATH, or leave it out",
            )
        return
    if not checkpoint.load.strip():
        yield Problem("checkpoint.load", '""', "must be a checkpoint or a run", "write checkpoint.load=runs/NAME")
    elif checkpoint.resume not in ("auto", "none"):
        rule = (
            f"a run begins with weights alone, or goes on from all of checkpoint.resume={checkpoint.resume}: not both"
        )
        fix = "leave one of the two out"
        yield Problem("checkpoint.load", show(checkpoint.load), rule, fix, ("checkpoint.resume",))


def _keeping(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.keep_every and checkpoint.every and checkpoint.keep_every % checkpoint.every:
        rule = f"must be a multiple of checkpoint.every={checkpoint.every}: only what is saved can be kept"
        nearest = max(1, round(checkpoint.keep_every / checkpoint.every)) * checkpoint.every
        fix = f"write checkpoint.keep_every={nearest}"
        yield Problem("checkpoint.keep_every", show(checkpoint.keep_every), rule, fix, ("checkpoint.every",))
    if checkpoint.local is None:
        return
    own = Path(checkpoint.dir).expanduser() if checkpoint.dir else run_directory(config) / "checkpoints"
    if not checkpoint.local.strip() or Path(checkpoint.local).expanduser().resolve() == own.resolve():
        rule = f"must be another folder than that of the checkpoints, {own}"
        fix = f"write checkpoint.local=/FAST/{run_directory(config).name}, or leave it null"
        yield Problem("checkpoint.local", show(checkpoint.local), rule, fix, ("checkpoint.dir",))


def _watching(config: Config) -> Iterator[Problem]:
    health = config.health
    if 0 < health.straggler <= 1:
        rule = "must be above 1: how many times as long as its peers a rank works, or 0"
        yield Problem("health.straggler", show(health.straggler), rule, "write health.straggler=1.06 (the default)")
    limit = config.parallel.timeout
    if health.limits.compute >= limit:
        rule = f"must be below parallel.timeout={limit}: else ranks that wait give up before their culprit is found"
        fix = f"write health.limits.compute={limit / 2:g}, or parallel.timeout={2 * health.limits.compute:.0f}"
        yield Problem("health.limits.compute", show(health.limits.compute), rule, fix, ("parallel.timeout",))
    if health.spike == "rollback" and not config.checkpoint.every:
        rule = "goes back to a checkpoint, and checkpoint.every=0 saves none before the end"
        yield Problem("health.spike", "rollback", rule, "write checkpoint.every=100", ("checkpoint.every",))


def _injecting(config: Config) -> Iterator[Problem]:
    for index, fault in enumerate(config.debug.inject):
        here = f"debug.inject[{index}]"
        total = total_steps(config)
        for key, low, high in _bounds(config, fault, total):
            value = getattr(fault, key)
            if value is not None and not low <= value <= high:
                rule = f"must be from {low} to {high}"
                yield Problem(f"{here}.{key}", show(value), rule, f"write {key}: {min(max(value, low), high)}")
        if fault.kind == "slow" and fault.factor <= 1:
            yield Problem(f"{here}.factor", show(fault.factor), "must be above 1", "write factor: 3.0")


def _bounds(config: Config, fault: InjectConfig, total: int) -> Iterator[tuple[str, int, int]]:
    """Keys of a fault with the smallest and largest value that can happen."""
    yield "step", 1, max(1, total)
    yield "rank", 0, 10**6
    if fault.last is not None:
        yield "last", fault.step, max(fault.step, total)
    if fault.kind == "nan":
        yield "layer", 0, config.model.layers - 1
        yield "micro_batch", 0, config.train.global_batch - 1
    if fault.attempt is not None:
        yield "attempt", 1, 10**6


def injection_problems(config: Config, world: int) -> Iterator[Problem]:
    """Faults of ranks that there are not."""
    for index, fault in enumerate(config.debug.inject):
        if fault.rank >= world:
            rule = f"there is no such rank among {world}, which are counted from 0"
            yield Problem(f"debug.inject[{index}].rank", show(fault.rank), rule, f"write rank: {world - 1}")


SAFETY_RULES: Sequence[Callable[[Config], Iterator[Problem]]] = (_resuming, _loading, _keeping, _watching, _injecting)
