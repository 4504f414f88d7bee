"""Work for tests of workers; a module of its own, because working processes import it."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.preparing.workers import Tell
from errors import DataRefused


@dataclass(frozen=True)
class Square:
    """Squares numbers, or fails in a certain way."""

    way: str = "well"

    def __call__(self) -> Callable[[int, Tell], Any]:
        return self.work

    def work(self, job: int, tell: Tell) -> Any:
        tell(job)
        match self.way:
            case "who":
                return os.getpid(), os.environ["OMP_NUM_THREADS"]
            case "refused":
                raise DataRefused("not this one")
            case "bug":
                return job // 0
            case "disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "slow":
                for _ in range(6000):
                    time.sleep(0.01)
                    tell(1)
        return job**2
