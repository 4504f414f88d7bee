"""One process prepares, the others wait: a lock that dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data.progress import Every, Say

_POLL_SECONDS = 0.1
_SECONDS_A_LINE = 5.0
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})


@contextmanager
def exclusive(path: Path, task: str, say: Say) -> Iterator[Say | None]:
    """Holds the lock file `path` for `task`; others wait, and say for whom every few seconds.

    Yields a function that tells those who wait how far the holder is, or None where the file system knows no
    locks (then every process does the task). The kernel drops the lock of a process that dies, however it
    dies; the file itself stays. Raises OSError where the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locked = _lock(descriptor, path, task, say)
        if locked:
            _write(descriptor, f"{_who()}: {task}")
        yield (lambda state: _write(descriptor, f"{_who()}: {state}")) if locked else None
    finally:
        os.close(descriptor)


def hold_shared(path: Path) -> None:
    """Holds a shared lock on the file `path` until this process ends, however it ends; does nothing where the file
    system knows no locks. Raises OSError where the file cannot be made."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _UNSUPPORTED:
            raise


def wait_for_holders(path: Path, task: str, say: Say) -> None:
    """Returns when no process holds a lock on `path` any more; `task` is what they do. Raises OSError."""
    with exclusive(path, task, say):
        pass


def _lock(descriptor: int, path: Path, task: str, say: Say) -> bool:
    began, due = time.monotonic(), Every(_SECONDS_A_LINE, at_once=True)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if due():
                holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
                seconds = time.monotonic() - began
                say(f"waiting while another process is {task} ({holder}), {seconds:.0f} s so far")
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            say(f"the file system of {path.parent} has no locks ({error.strerror}): every process is {task} itself")
            return False


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _write(descriptor: int, state: str) -> None:
    # What waiting processes read is a courtesy: a full disk shows itself where it matters.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, state.encode(), 0)
