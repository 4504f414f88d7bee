"""The ways a command ends on purpose, each with the exit code that scripts and launchers rely on."""

from __future__ import annotations

import sys
from collections.abc import Callable


class Refused(Exception):
    """A refusal in words: the message gives the value, the rule and the fix; no traceback is shown."""

    exit_code = 1


class ConfigRefused(Refused):
    """The configuration cannot work."""

    exit_code = 2


class DataRefused(Refused):
    """A corpus, tokenizer or cache cannot be used."""

    exit_code = 3


class PeerLost(Refused):
    """Another process of the run has ended or does not answer; its own message says why."""


class CheckpointRefused(Refused):
    """A checkpoint cannot be read, written or continued from."""

    exit_code = 3


class Diverged(Refused):
    """Training was stopped by policy because its numbers stopped making sense."""

    exit_code = 4


class StopRequested(Refused):
    """Training stopped on request, after saving; the same command goes on from there."""

    exit_code = 75


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command: its own exit code (0 for None), or a refusal's, whose words go to stderr without a traceback."""
    try:
        return command() or 0
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return refusal.exit_code
