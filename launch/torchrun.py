"""torchrun, with its own options, that ends with the exit code of the process that failed, and names it in a line.

torchrun itself turns every code into 1 and prints its own traceback, also where a run was stopped on request.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_TOLD = (2, 3, 4, 75)  # codes whose reason rank 0 has said
_AGENT = "torch.distributed.elastic.multiprocessing.api"
_NOISE = ("failed (exitcode", "Sending process")
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun's command line; the exit code of this host's processes."""
    _end_with_the_launcher()
    logging.getLogger(_AGENT).addFilter(lambda record: not str(record.msg).startswith(_NOISE))
    try:
        torchrun(list(sys.argv[1:] if argv is None else argv))
    except ChildFailedError as error:
        return _code(error)
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


def _end_with_the_launcher() -> None:
    """When the shell that waits for this process is killed, take SIGTERM: the run saves and ends, and none is left."""
    if sys.platform == "linux":
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it was killed before
            sys.exit(128 + signal.SIGTERM)


def _code(error: ChildFailedError) -> int:
    """Code of the process that failed first; of several in the same second, one that says something."""
    rank, first = min(error.failures.items(), key=lambda item: (item[1].timestamp, _silence(item[1].exitcode), item[0]))
    if first.exitcode in _TOLD:
        return first.exitcode
    how = f"killed by {first.signal_name()}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    print(f"rank {rank} (process {first.pid}) failed first: {how}", file=sys.stderr)
    return 1


def _silence(code: int) -> int:
    """How little a code says; SIGTERM is what torchrun itself sends to the others."""
    return 0 if code in _TOLD else 2 if code == -signal.SIGTERM else 1


if __name__ == "__main__":
    sys.exit(main())
