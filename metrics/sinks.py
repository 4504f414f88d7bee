"""Where a run's records go: the terminal and log.txt, metrics.jsonl, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from errors import ConfigRefused, DataRefused
from files import lines_backwards
from metrics.config import MetricsConfig


class Console:
    """Says each line on the terminal and, once it knows the run's folder, in its log.txt with the time.

    A silent one says nothing: of several processes one speaks.
    """

    def __init__(self, stream: TextIO | None = None, silent: bool = False) -> None:
        self.stream, self.silent = stream if stream is not None else sys.stdout, silent
        self.log: TextIO | None = None
        self.early: list[str] = []

    def open_log(self, path: Path) -> None:
        """Append to `path` from now on, with what was said before."""
        self.log = path.open("a", encoding="utf-8")
        for line in self.early:
            self._write(line)
        self.early.clear()

    def say(self, line: str) -> None:
        """Print one line."""
        if self.silent:
            return
        try:
            print(line, file=self.stream, flush=True)
        except BrokenPipeError:  # nobody reads any more; the log still does
            self.stream = Path(os.devnull).open("w")  # noqa: SIM115
        if self.log is None:
            self.early.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if self.log is not None:
            with suppress(OSError):  # a full disk shows itself where it matters
                self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
                self.log.flush()

    def note(self, text: str) -> None:
        """Write to log.txt alone, if it is open."""
        self._write(text)

    def close(self) -> None:
        """Close log.txt."""
        if self.log is not None:
            with suppress(OSError):
                self.log.close()
            self.log = None


def finite_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record with each non-finite number as None, and those keys listed under `nonfinite`."""
    bad: list[str] = []
    clean = {key: _clean(value, key, bad) for key, value in record.items()}
    return clean | {"nonfinite": bad} if bad else clean


def _clean(value: Any, key: str, bad: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: _clean(v, f"{key}.{k}", bad) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(key)
        return None
    return value


class JsonLines:
    """Appends one JSON object a line; each line is on its way to the disk before the next step."""

    def __init__(self, path: Path) -> None:
        self._end_cut_line(path)
        self.file = path.open("a", encoding="utf-8")

    @staticmethod
    def _end_cut_line(path: Path) -> None:
        """A killed process may have left half a line; drop it, so that every line parses."""
        if path.exists() and (cut := next(lines_backwards(path))):
            os.truncate(path, path.stat().st_size - len(cut))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record that holds finite numbers only."""
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise DataRefused(f"cannot write {self.file.name}: {error}; make room and start again") from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self.file.close()


class Wandb:
    """One W&B run, the same one after a resume; x axis `train/step`."""

    def __init__(
        self, config: MetricsConfig, directory: Path, name: str, run_id: str, settings: dict[str, Any]
    ) -> None:
        self.run: Any = None
        if config.wandb == "disabled":
            return
        import wandb

        try:
            self.run = self._start(wandb, config, directory, name, run_id, settings)
        except wandb.errors.Error as error:
            raise ConfigRefused(
                f"metrics.wandb={config.wandb}: W&B does not start ({error}); check the network and the login, or "
                f"write metrics.wandb=offline"
            ) from error
        self.run.define_metric("train/step")
        self.run.define_metric("*", step_metric="train/step")

    @staticmethod
    def _start(
        wandb: Any, config: MetricsConfig, directory: Path, name: str, run_id: str, settings: dict[str, Any]
    ) -> Any:
        return wandb.init(
            project=config.wandb_project, entity=config.wandb_entity, group=config.wandb_group,
            tags=list(config.wandb_tags), name=name, id=run_id, resume="allow", mode=config.wandb,
            dir=directory, config=settings, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def write(self, record: dict[str, Any]) -> None:
        """Log a step's record as train/..., an event's as <event>/...; Nones are left out."""
        if self.run is None:
            return
        room = record.get("event", "train")
        flat = _flatten(record, room)
        flat["train/step"] = record["step"]
        self.run.log({k: v for k, v in flat.items() if v is not None})

    def close(self, exit_code: int = 0) -> None:
        """Finish the W&B run."""
        if self.run is not None:
            self.run.finish(exit_code)
            self.run = None


def _flatten(record: dict[str, Any], room: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if key == "linears":  # thousands of series; they are in metrics.jsonl
            continue
        if isinstance(value, dict):
            flat |= _flatten(value, f"{room}/{key}")
        elif key not in ("event", "nonfinite"):
            flat[f"{room}/{key}"] = value
    return flat
