"""The folder that holds a preparation's unfinished work: made whole, taken over by a later start, removed at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from data.lock import wait_for_holders
from data.preparing.report import Plan, differences
from data.progress import Say
from errors import DataRefused
from files import sync, write_whole


class WorkFolder:
    """The work of `plan` in the folder `path`; everything is done under the lock of the preparation.

    It is filled under another name and renamed, and renamed before it is emptied: a folder of this name always has
    its plan.json.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self._plan = path.absolute(), plan
        self.alive = self.path / "workers.lock"
        self._new, self._old = (self.path.with_name(f".{path.name}.{state}") for state in ("new", "old"))

    def clean(self) -> None:
        """Removes what a process that died while it made or removed the folder has left."""
        for left in (self._new, self._old):
            shutil.rmtree(left, ignore_errors=True)

    def is_ours(self) -> bool:
        """Whether it is there and of this plan."""
        return self._plan_found() == self._plan

    def take_over(self, overwrite: bool, say: Say) -> bool:
        """Whether there is work of this plan, which can be gone on with: its processes have ended, and what they were
        about to write is gone. Work of another plan is removed where `overwrite` says so. Raises DataRefused for a
        folder that may not be removed."""
        if not self.path.exists():
            return False
        if not self.is_ours():
            self._refuse_other(overwrite)
            self.remove()
            return False
        wait_for_holders(self.alive, "ending", say)
        for left in (*self.path.glob("*.tmp"), *self.path.glob(".*.part")):
            left.unlink()
        return True

    def make(self) -> None:
        """Makes it, with its plan."""
        self._new.mkdir()
        write_whole(self._new / "plan.json", json.dumps(self._plan, indent=2))
        self._new.rename(self.path)
        sync(self.path.parent)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        self.path.rename(self._old)
        shutil.rmtree(self._old)

    def remove_if_empty(self) -> None:
        """Removes it unless some of the work is done."""
        if self.is_ours() and not list(self.path.glob("lot_*.json")):
            self.remove()

    def _plan_found(self) -> Plan | None:
        """The plan in it; None: there is no folder, or it is none of ours."""
        try:
            plan = json.loads((self.path / "plan.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return plan if isinstance(plan, dict) else None

    def _refuse_other(self, overwrite: bool) -> None:
        plan = self._plan_found()
        if plan is None:
            raise DataRefused(
                f"{self.path} has no plan.json that can be read, so it is not known whose it is: remove it, or choose "
                "another output"
            )
        if not overwrite:
            raise DataRefused(
                f"{self.path} holds the unfinished work of another preparation ({differences(plan, self._plan)}): pass "
                "--overwrite, or remove it, or choose another output"
            )
