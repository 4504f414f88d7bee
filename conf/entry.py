"""The way into a command that starts a run: flags, configuration, refusals in words, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from conf.compose import compose
from conf.flags import Invocation, parse
from conf.help import help_text
from conf.multirun import run_all
from conf.problem import Problem, refuse
from conf.resolve import run_directory, run_name, to_yaml
from conf.schema import Config
from conf.suggest import did_you_mean
from errors import Refused
from parallel.ranks import Ranks, find_ranks

Run = Callable[[Config, list[str]], int]
"""What a command does with its configuration and overrides; returns the exit code."""
_INTERRUPTED = 130


def main(run: Run, argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Answer --help and --cfg, or compose and run; a refusal is printed without a traceback.

    Of several processes rank 0 answers; what is refused is told by the first process of each host.
    """
    ranks = Ranks()
    try:
        ranks = find_ranks(os.environ)
        return _main(run, parse(sys.argv[1:] if argv is None else argv), program, ranks)
    except Refused as refusal:
        if ranks.local_rank == 0:  # hosts may differ in what they have, so the first process of each tells
            print(refusal, file=sys.stderr)
        return refusal.exit_code
    except KeyboardInterrupt:
        _say(ranks, "Interrupted.", "\n", sys.stderr)
        return _INTERRUPTED


def _say(ranks: Ranks, text: str, end: str, where: TextIO) -> None:
    if ranks.rank == 0:
        print(text, end=end, file=where)


def _main(run: Run, invocation: Invocation, program: str, ranks: Ranks) -> int:
    if invocation.help:
        _say(ranks, help_text(program, invocation.config_dir), "", sys.stdout)
        return 0
    refuse(_flag_problems(invocation, ranks.world))
    overrides = list(invocation.overrides)
    if invocation.multirun:
        return run_all(program, overrides, invocation.config_dir)
    config = compose(overrides, invocation.config_dir, world=ranks.world)
    if "--cfg" in invocation.flags:
        text = f"# run {run_name(config)}, in {run_directory(config)}\n{to_yaml(config)}"
        _say(ranks, text, "", sys.stdout)
        return 0
    return run(config, overrides)


def _flag_problems(invocation: Invocation, world: int) -> list[Problem]:
    """What is wrong with the flags, taken together and with the number of processes."""
    shown = invocation.flags.get("--cfg")
    problems = []
    if shown is not None and shown != "job":
        hint = did_you_mean(shown, ("job",))
        rule = "only the job's configuration can be printed" + (f"; {hint}" if hint else "")
        problems.append(Problem(f"--cfg {shown}", None, rule, "write --cfg job"))
    elif shown is not None and invocation.multirun:
        rule = "prints one configuration, but -m asks for many runs"
        problems.append(Problem("--cfg job", None, rule, "leave out -m"))
    if invocation.multirun and world > 1:
        rule = f"a sweep starts its own processes, but this one is already a rank of a launcher, one of {world}"
        fix = "start each run with a torchrun of its own, or the sweep with `python` where one process a run will do"
        problems.append(Problem("--multirun", None, rule, fix))
    return problems
