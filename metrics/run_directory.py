"""The folder of one run: the files that people, scripts and launchers rely on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from traceback import format_exception
from typing import Any

from errors import ConfigRefused, Refused
from files import write_whole
from metrics.sinks import Console

_STATES = {2: "refused", 3: "refused", 4: "diverged", 75: "stopped"}
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

    def prepare(self, config_yaml: str, overrides: list[str]) -> None:
        """Make the folder and write what the run was started with."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigRefused(f"run.dir: cannot make the run's folder {self.path} ({error}); set run.dir") from error
        write_whole(self.path / "config.yaml", config_yaml)
        write_whole(self.path / "overrides.txt", "".join(f"{line}\n" for line in overrides))
        write_whole(self.path / "environment.txt", describe_environment())

    def status(self) -> dict[str, Any]:
        """The last status written, or {} where there is none."""
        try:
            found = json.loads(self.status_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def wandb_id(self) -> str:
        """Id of this run in W&B: eight hex digits drawn at its first start, then always the same."""
        file = self.path / "wandb" / "run_id"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            write_whole(file, os.urandom(4).hex() + "\n")
        return file.read_text(encoding="utf-8").strip()

    @contextmanager
    def attempt(self, console: Console) -> Iterator[None]:
        """Around one start of the run: whatever ends it is written to status.json, if the folder was made."""
        try:
            yield
        except BaseException as error:
            code = error.exit_code if isinstance(error, Refused) else 1
            status = self.status()
            if status:
                self.write_status(_STATES.get(code, "failed"), code, status["step"], status["attempt"])
            console.note(str(error) if isinstance(error, Refused) else "".join(format_exception(error)))
            raise
        finally:
            console.close()

    def write_status(self, state: str, code: int | None, step: int, attempt: int) -> None:
        """state: running, done, paused, stopped, refused, diverged or failed; code: None while running."""
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
