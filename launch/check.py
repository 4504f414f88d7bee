"""Checks a run's configuration for a number of processes, and prints the run's folder: what the launchers do first.

torchrun turns every exit code into 1, so a configuration is refused (2) before it starts. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conf.compose import compose
from conf.flags import CONFIG_DIR, HELP, Flag, Invocation, parse
from conf.problem import Problem, refuse
from conf.resolve import run_directory
from errors import exit_code_of

_FLAGS = (HELP, Flag(("--ranks",), "N", "processes of the run, over all hosts (1)"), CONFIG_DIR)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line to exit code; the folder is all that goes to stdout."""
    return exit_code_of(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    invocation = parse(argv, _FLAGS)
    if invocation.help:
        print(_help())
        return
    config = compose(invocation.overrides, invocation.config_dir, world=_ranks(invocation))
    print(run_directory(config).absolute())


def _ranks(invocation: Invocation) -> int:
    given = invocation.flags.get("--ranks", "1")
    if not given.isdecimal() or int(given) < 1:
        refuse([Problem(f"--ranks {given}", None, "the number of processes is 1 or more", "write --ranks 8")])
    return int(given)


def _help() -> str:
    flags = "\n".join(f"  {', '.join(flag.names)} {flag.argument or ''}".ljust(26) + flag.doc for flag in _FLAGS)
    return f"usage: python -m launch.check [--ranks N] [key=value ...]\n\n{__doc__}\n{flags}"


if __name__ == "__main__":
    sys.exit(main())
