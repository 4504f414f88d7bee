"""The folder of one run: the files that people, scripts and launchers rely on."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from traceback import format_exception
from typing import Any

from errors import ConfigRefused, DataRefused, PeerLost, Refused
from files import write_whole
from metrics.goodput import process_began
from metrics.sinks import Console


class _Held(ConfigRefused):
    """Another process has the folder: its status is not ours to write."""


_STATES = {130: "interrupted", 2: "refused", 3: "refused", 4: "diverged", 75: "stopped"}
_FINAL = (2, 3, 4, 75)
_REPORTED = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "sentencepiece", "wandb", "transformer-engine")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run, and the small files it keeps."""

    path: Path
    """The folder itself."""

    @property
    def status_file(self) -> Path:
        """Where the run stands, for launchers."""
        return self.path / "status.json"

    @property
    def stop_file(self) -> Path:
        """Put there by anyone to ask for a save and an end."""
        return self.path / "stop"

    def prepare(self, step: int) -> None:
        """Make the folder, and count the attempt; step: where it goes on."""
        with self._refusing_an_unwritable_folder():
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.write_status("running", None, step, self.status().get("attempt", 0) + 1)

    def record(self, config_yaml: str, overrides: list[str], processes: str = "1") -> None:
        """Write what the run is trained with; processes: how many, and how they share the work."""
        with self._refusing_an_unwritable_folder():
            write_whole(self.path / "config.yaml", config_yaml)
            write_whole(self.path / "overrides.txt", "".join(f"{line}\n" for line in overrides))
            write_whole(self.path / "environment.txt", f"processes: {processes}\n" + describe_environment())

    @contextmanager
    def _refusing_an_unwritable_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigRefused(f"run.dir: cannot write the run's folder {self.path} ({error}); set run.dir") from error

    def finish(self, state: str, step: int) -> None:
        """State done (or paused, by train.stop_at) with code 0; a request to stop is thereby met."""
        self.write_status(state, 0, step, self.status().get("attempt", 1))
        self.stop_file.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """The last status written, or {} where there is none."""
        try:
            found = json.loads(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and isinstance(found.get("attempt"), int) else {}

    def stamped_status(self) -> dict[str, Any]:
        """The status and when it was written, so that a new one differs from the same words of before."""
        with suppress(OSError):
            return self.status() | {"written": self.status_file.stat().st_mtime_ns}
        return {}

    def ended_for_good(self, environ: Mapping[str, str]) -> int | None:
        """The exit code with which this run has ended already, where torchrun starts it again all the same: it does so
        after every code but 0. None: the run is to go on."""
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if not restarts.isdecimal() or int(restarts) == 0:
            return None
        code, written = self.status().get("code"), self.stamped_status().get("written", 0)
        if code not in _FINAL or written / 1e9 <= process_began(os.getppid()):
            return None
        return int(code)

    def note_step(self, step: int, attempt: int) -> None:
        """The step that was reached, unless it is known already how the run ended."""
        if self.status().get("state") == "running":
            self.write_status("running", None, step, attempt)

    def wandb_id(self, kept: str | None) -> str:
        """Id of this run in W&B: this folder's, else the checkpoint's, else eight new hex digits."""
        file = self.path / "wandb" / "run_id"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            write_whole(file, (kept or os.urandom(4).hex()) + "\n")
        return file.read_text(encoding="utf-8").strip()

    @contextmanager
    def attempt(self, console: Console) -> Iterator[None]:
        """Around one start of the run: whatever ends it is written to status.json, if the folder was made."""
        try:
            with self._held(), self._refusing_what_the_system_refuses():
                yield
        except BaseException as error:
            if not isinstance(error, _Held):
                self._record_end(error, console)
            raise
        finally:
            console.close()

    @contextmanager
    def _refusing_what_the_system_refuses(self) -> Iterator[None]:
        """A full disk, a folder where a file should be, a missing permission: a message, and the trace in the log."""
        try:
            yield
        except OSError as error:
            raise DataRefused(
                f"the system refused a file of the run in {self.path}: {error}; make room or mend it, then start again"
            ) from error

    def _record_end(self, error: BaseException, console: Console) -> None:
        """Write how the start ended, and the error into the log."""
        self.record_end(error)
        with suppress(OSError):
            plain = isinstance(error, Refused) and error.__cause__ is None
            console.note(str(error) if plain else "".join(format_exception(error)))

    def record_end(self, error: BaseException) -> None:
        """Write how the start ended; on a full disk the error itself matters more.

        At once, as launchers end the other processes soon. What a lost process said of itself stands.
        """
        code = error.exit_code if isinstance(error, Refused) else 130 if isinstance(error, KeyboardInterrupt) else 1
        with suppress(OSError):
            status = self.status()
            told = isinstance(error, PeerLost) and status.get("state", "running") != "running"
            if self.path.is_dir() and not told:
                self.write_status(_STATES.get(code, "failed"), code, status.get("step", 0), status.get("attempt", 0))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the run's lock, which the system drops when the process ends, however it ends."""
        with self._refusing_an_unwritable_folder():
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _Held(
                    f"another process is training in {self.path}; wait for it, or set another run.name"
                ) from error
            except OSError:  # a file system without locks
                pass
            yield

    def write_status(self, state: str, code: int | None, step: int, attempt: int) -> None:
        """state: running, done, paused, stopped, refused, diverged, interrupted or failed; code: None while running."""
        record = {"state": state, "code": code, "step": step, "attempt": attempt}
        write_whole(self.status_file, json.dumps(record) + "\n")


def describe_environment() -> str:
    """Versions and machine, a line each; nothing from the environment's variables."""
    lines = {"python": sys.version.split()[0], "platform": platform.platform(), "cores": str(os.cpu_count())}
    lines["git"] = _git_revision()
    for package in _REPORTED:
        try:
            lines[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            lines[package] = "not installed"
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


def _git_revision() -> str:
    """Commit of the code, marked where files differ from it."""
    root = Path(__file__).parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
