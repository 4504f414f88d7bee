"""Stands for python, srun or scontrol in tests of the launchers: notes its arguments and does what PLAN says.

PLAN is a list, one entry a start (the last one repeats): a number is a run that writes that code to status.json, as
its own new attempt; the words are those of `_play`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(os.environ["STUB"])
RUN = HERE / "run"


def _note(file: str, record: object) -> int:
    """Add a line; how many there were before."""
    path = HERE / file
    before = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as opened:
        opened.write(json.dumps(record) + "\n")
    return before


def _status(code: int | None, new: int = 1, step: int = 0) -> None:
    file = RUN / "status.json"
    attempt = json.loads(file.read_text())["attempt"] if file.exists() else 0
    RUN.mkdir(exist_ok=True)
    beside = RUN / "beside"
    beside.write_text(json.dumps({"state": "x", "code": code, "step": step, "attempt": attempt + new}) + "\n")
    beside.replace(file)


def _play(what: object) -> int:
    """One start of the trainer under torchrun or srun, and what they return."""
    if isinstance(what, int):
        _status(what)
        return min(what, 1)
    if what == "refused early":  # as a run that has a status already and is not allowed to resume
        _status(2, new=0)
    if what == "crash":
        _status(None)
    if what == "progress and crash":
        _status(None, step=int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1)
    if what in ("obey", "deaf"):
        return _wait(what == "obey")
    return 1  # "silent": no word of it


def _wait(obeys: bool) -> int:
    """Run until the stop file comes; the deaf one does not look for it, and ends on SIGTERM."""

    def note(number: int, frame: object) -> None:
        _note("signals.jsonl", signal.Signals(number).name)
        if number == signal.SIGTERM and not obeys:
            sys.exit(1)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    _status(None)
    (HERE / "ready").touch()
    while not (obeys and (RUN / "stop").exists()):
        time.sleep(0.02)
    (RUN / "stop").unlink()
    _status(75, new=0)
    return 1


def main() -> int:
    """What the name it is called by would do."""
    program, words = Path(sys.argv[0]).name, sys.argv[1:]
    if words[:2] == ["-m", "launch.check"]:
        _note("checks.jsonl", words[2:])
        print(RUN)
        return int(os.environ.get("CHECK", "0"))
    if program == "scontrol":
        _note("scontrol.jsonl", words)
        return int(os.environ.get("SCONTROL", "0"))
    plan = json.loads(os.environ["PLAN"])
    return _play(plan[min(_note("starts.jsonl", words), len(plan) - 1)])


if __name__ == "__main__":
    sys.exit(main())
