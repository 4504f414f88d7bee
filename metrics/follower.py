"""How a start of a run ends on a process that does not lead: told once, with the right exit code, and recorded."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from errors import CheckpointRefused, ConfigRefused, Diverged, PeerLost, StopRequested
from metrics.run_directory import RunDirectory

# What ends all processes with the same words once they have joined: the one that leads says them.
_SHARED = (ConfigRefused, CheckpointRefused, Diverged, PeerLost, StopRequested)
_LEADER_SECONDS = 10.0
_MOMENT = 0.5  # seconds in which a leader that lost a process as well says so


class Follower:
    """Around a start of the run.

    Before the processes have joined, the first one of each host tells what it meets, as hosts may differ. Then,
    what ends one alone is told and recorded by it, as the others only wait for it; what ends all is said and
    recorded by the one that leads. That is waited for, as launchers end all processes when the first one ends; a
    leader that says nothing in time is spoken for.
    """

    def __init__(self, directory: RunDirectory, rank: int, first_on_host: bool) -> None:
        self.directory, self.rank, self.first_on_host = directory, rank, first_on_host
        self.joined = False
        self.before: dict[str, Any] = {}

    def __enter__(self) -> Follower:
        self.before = self.directory.stamped_status()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell, record or wait; the exception goes on."""
        if not isinstance(error, Exception):
            return
        alone = self.joined and not isinstance(error, _SHARED)
        lost = self.joined and isinstance(error, PeerLost)  # perhaps the leader itself
        if (
            alone
            or (self.first_on_host and not self.joined)
            or not self._leader_has_spoken(_MOMENT if lost else _LEADER_SECONDS)
        ):
            self._tell(error)
        if alone or lost:
            self.directory.record_end(error)

    def _tell(self, error: Exception) -> None:
        print(f"rank {self.rank}: {error}", file=sys.stderr, flush=True)

    def _leader_has_spoken(self, seconds: float) -> bool:
        """Whether, within this time, status.json says how the start ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = self.directory.stamped_status()
            if now != self.before and now.get("state") != "running":
                return True
            time.sleep(0.05)
        return False
