"""Many runs one after another: every combination is checked before the first one starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import FrameType

from conf.compose import attempt
from conf.groups import folder_problems, read_groups, repository_folder
from conf.overrides import quoted
from conf.problem import Problem, refuse
from conf.resolve import run_name
from conf.schema import Config
from conf.sweep import Combination, expand

_STOPPED = frozenset({75, 130, -signal.SIGINT, -signal.SIGTERM})
"""Exit codes after which the jobs that are left are not started."""
_SHOWN = 3
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """One checked run of a sweep."""

    name: str
    """Its run.name, unlike every other job's."""
    overrides: tuple[str, ...]
    """What it is started with."""
    label: str
    """The swept overrides."""


def run_all(program: str, overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Run every combination in a process of its own; returns the first exit code that is not 0."""
    jobs = plan(overrides, config_dir)
    script = program.split() if program.startswith("-m ") else [str(repository_folder().parent / program)]
    place = ["--config-dir", config_dir] if config_dir else []
    codes: list[int | None] = []
    for number, job in enumerate(jobs, 1):
        if codes and codes[-1] in (*_STOPPED, None):
            codes.append(None)
            continue
        print(f"[{number}/{len(jobs)}] {job.name}  {job.label}".rstrip(), flush=True)
        started = time.monotonic()
        codes.append(_run([sys.executable, *script, *job.overrides, *place]))
        print(
            f"[{number}/{len(jobs)}] exit code {codes[-1]} after {time.monotonic() - started:.0f} s",
            flush=True,
        )
    print(_table(jobs, codes), flush=True)
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def plan(overrides: Sequence[str], config_dir: str | None = None) -> list[Job]:
    """The jobs of a sweep, each valid and with its own name; raises one ConfigRefused for all of them."""
    refuse(folder_problems(config_dir))
    combinations, problems = expand(overrides, read_groups(config_dir))
    refuse(problems)
    configs, found = [], []
    for combination in combinations:
        config, wrong = attempt(combination.overrides, config_dir)
        configs.append(config)
        found.append(wrong)
    refuse(_labelled(combinations, found))
    return _named(combinations, configs)


def _labelled(combinations: Sequence[Combination], found: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Each problem once, with the combinations that have it unless all do."""
    having: dict[Problem, list[str]] = {}
    for combination, problems in zip(combinations, found, strict=True):
        for problem in dict.fromkeys(problems):
            having.setdefault(problem, []).append(combination.label)
    return [
        problem if len(labels) == len(combinations) else replace(problem, rule=f"{problem.rule}  [with {_few(labels)}]")
        for problem, labels in having.items()
    ]


def _few(labels: Sequence[str]) -> str:
    rest = len(labels) - _SHOWN
    return "; ".join(labels[:_SHOWN]) + (f"; and {rest} more combinations" if rest > 0 else "")


def _named(combinations: Sequence[Combination], configs: Sequence[Config]) -> list[Job]:
    """Names as they are where they differ, else with -1, -2, ... behind them."""
    wanted = [run_name(config) for config in configs]
    counts, taken = Counter(wanted), {name for name, count in Counter(wanted).items() if count == 1}
    jobs = []
    for combination, name in zip(combinations, wanted, strict=True):
        own, number = name, 0
        while counts[name] > 1 and (number == 0 or own in taken):
            number += 1
            own = f"{name}-{number}"
        taken.add(own)
        given = () if own == name else (f"run.name={quoted(own)}",)
        jobs.append(Job(own, (*combination.overrides, *given), combination.label))
    return jobs


def _run(command: list[str]) -> int:
    """One job to its end; signals that ask this process to stop are passed on, and the job may save first."""
    with subprocess.Popen(command) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            return _wait(process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code; Ctrl-C reaches the job by itself, so here it only ends the sweep after the job."""
    interrupted = False
    while True:
        try:
            code = process.wait()
            return 130 if interrupted and code == 0 else code
        except KeyboardInterrupt:
            interrupted = True


def _table(jobs: Sequence[Job], codes: Sequence[int | None]) -> str:
    width = max(len(job.name) for job in jobs)
    rows = [
        f"  {'not started' if code is None else code!s:>11}  {job.name:<{width}}  {job.label}".rstrip()
        for job, code in zip(jobs, codes, strict=True)
    ]
    return "\n".join([f"    exit code  {'run':<{width}}  settings", *rows])
