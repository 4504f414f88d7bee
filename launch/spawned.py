"""The life of a rank that `launch.spawn` started, in the rank's own process."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import format_exception
from typing import Any

from errors import PeerLost, Refused
from parallel.process import is_loss
from parallel.ranks import Ranks


@dataclass(frozen=True)
class Report:
    """The one message of a rank."""

    result: Any = None
    """What the target returned."""
    failure: str = ""
    """How it failed; empty: it did not."""
    traceback: str = ""
    """Empty for a refusal."""
    exit_code: int = 1
    """A refusal's own code, else 1."""
    doubt: int = 0
    """How likely it failed only because another one did: 0 not, 1 it died without a word, 2 it lost a connection."""


def live(
    target: Callable[..., Any], ranks: Ranks, args: Sequence[Any], folder: Path, environ: dict[str, str],
    output: Sequence[Connection], results: Connection, alive: Connection,
) -> None:  # fmt: skip
    """Call the target, and report its result or how it failed."""
    _end_with(alive)
    for stream, given in zip((sys.stdout, sys.stderr), output, strict=True):
        os.dup2(given.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    with (folder / f"stack_{ranks.rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR2, file=stack)
        try:
            import torch  # the caller does without

            torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
            report = pickle.dumps(Report(target(ranks, *args)))
        except BaseException as error:
            report = pickle.dumps(_report_of(error))
        results.send_bytes(report)
        results.close()
        faulthandler.unregister(signal.SIGUSR2)


def _end_with(alive: Connection) -> None:
    """The kernel ends this process (SIGIO) when the caller's end of the pipe closes, even one that hangs in C."""
    fcntl.fcntl(alive.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive.fileno(), fcntl.F_SETFL, fcntl.fcntl(alive.fileno(), fcntl.F_GETFL) | os.O_ASYNC)
    if alive.poll():  # it had closed before
        os._exit(1)


def _report_of(error: BaseException) -> Report:
    if isinstance(error, PeerLost):  # its cause shows in which collective
        error = error.__cause__ or error
    elif isinstance(error, Refused):
        return Report(failure=f"refused: {error}", exit_code=error.exit_code)
    if error.__traceback__ and error.__traceback__.tb_next:  # without the frame of this file
        error = error.with_traceback(error.__traceback__.tb_next)
    trace = "".join(format_exception(error)).rstrip()
    lost = isinstance(error, PeerLost) or is_loss(error)
    return Report(failure=f"failed:\n{trace}", traceback=trace, doubt=2 if lost else 0)
