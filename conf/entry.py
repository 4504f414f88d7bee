"""The way into a command that starts a run: flags, configuration, refusals in words, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from conf.compose import compose
from conf.flags import Invocation, parse
from conf.help import help_text
from conf.multirun import run_all
from conf.problem import Problem, refuse
from conf.resolve import run_directory, run_name, to_yaml
from conf.schema import Config
from conf.suggest import did_you_mean
from errors import Refused

Run = Callable[[Config, list[str]], int]
"""What a command does with its configuration and overrides; returns the exit code."""
_INTERRUPTED = 130


def main(run: Run, argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Answer --help and --cfg, or compose and run; a refusal is printed without a traceback."""
    try:
        return _main(run, parse(sys.argv[1:] if argv is None else argv), program)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED


def _main(run: Run, invocation: Invocation, program: str) -> int:
    if invocation.help:
        print(help_text(program, invocation.config_dir), end="")
        return 0
    refuse(_flag_problems(invocation))
    overrides = list(invocation.overrides)
    if invocation.multirun:
        return run_all(program, overrides, invocation.config_dir)
    config = compose(overrides, invocation.config_dir)
    if "--cfg" in invocation.flags:
        print(f"# run {run_name(config)}, in {run_directory(config)}\n{to_yaml(config)}", end="")
        return 0
    return run(config, overrides)


def _flag_problems(invocation: Invocation) -> list[Problem]:
    shown = invocation.flags.get("--cfg")
    if shown is None:
        return []
    if shown != "job":
        hint = did_you_mean(shown, ("job",))
        rule = "only the job's configuration can be printed" + (f"; {hint}" if hint else "")
        return [Problem(f"--cfg {shown}", None, rule, "write --cfg job")]
    if invocation.multirun:
        return [Problem("--cfg job", None, "prints one configuration, but -m asks for many runs", "leave out -m")]
    return []
