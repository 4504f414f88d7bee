"""python -m metrics.report RUN: a picture of a run from its metrics.jsonl."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from errors import DataRefused, exit_code_of
from metrics.clock import PARTS

Record = dict[str, Any]


def read_records(run: Path) -> list[Record]:
    """Every record of a run's metrics.jsonl; of a step made twice, the later one.

    Raises:
        DataRefused: there is no such file, or a line of it is not a record.
    """
    file = run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataRefused(f"cannot read {file}: {error}; name a run's directory, such as runs/NAME") from error
    latest = {(r.get("event", "step"), r["step"]): r for r in records}
    return sorted(latest.values(), key=lambda r: r["step"])


_MARKED = {
    "resume": "tab:gray", "skip": "tab:olive", "fault": "tab:red", "spike": "tab:orange", "rollback": "tab:blue",
    "straggler": "tab:pink", "save_failed": "tab:brown", "damaged": "black", "replicas": "tab:cyan",
}  # fmt: skip


def draw(records: list[Record], title: str, output: Path) -> None:
    """Loss, norm and learning rate, speed, and where the time went, into an image file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [r for r in records if "event" not in r]
    if not steps:
        raise DataRefused(f"no step has been recorded yet in {title}")
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    figure.suptitle(title)
    loss, speed, norm, time = figure.subplots(2, 2).flatten()
    at = [r["step"] for r in steps]
    _draw_loss(loss, at, steps, [r for r in records if r.get("event") == "validation"])
    _draw_events(norm, records)
    speed.plot(at, [r["tokens_per_s"] for r in steps], color="tab:green", linewidth=0.8)
    speed.set(title="tokens a second", ylim=(0, None))
    norm.plot(at, [_number(r["grad_norm"]) for r in steps], color="tab:purple", linewidth=0.8)
    norm.set(title="gradient norm before clipping", xlabel="step", yscale="log")
    shown = [p for p in PARTS if any(r["time"][p] > 0 for r in steps)]
    time.stackplot(at, [[r["time"][p] for r in steps] for p in shown], labels=shown)
    time.set(
        title="where a step's time goes (s)", xlabel="step", ylim=(0, 3 * _median([r["step_time"] for r in steps]))
    )
    time.legend(fontsize="x-small", ncols=3)
    for axes in (loss, speed, norm, time):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(output, dpi=110)


def _draw_loss(axes: Any, at: list[int], steps: list[Record], validations: list[Record]) -> None:
    axes.plot(at, [_number(r["loss"]) for r in steps], linewidth=0.8, label="training")
    if validations:
        held = [_number(r["val_loss"]) for r in validations]
        axes.plot([r["step"] for r in validations], held, "o-", label="validation")
    axes.set(title="loss (nats a token)")
    axes.legend()


def _draw_events(axes: Any, records: list[Record]) -> None:
    """A line where something happened that is not to be expected, a colour a kind."""
    for kind, colour in _MARKED.items():
        places = sorted({r["step"] for r in records if r.get("event") == kind})
        for number, step in enumerate(places):
            label = f"{kind} ({len(places)})" if number == 0 else None
            axes.axvline(step, color=colour, linestyle=":", linewidth=1.2, label=label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _number(value: float | None) -> float:
    """A recorded null was not finite."""
    return float("nan") if value is None else value


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(argv: list[str] | None = None) -> int:
    """Command line; a refusal is a message and its exit code."""
    parser = argparse.ArgumentParser(prog="python -m metrics.report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("--output", type=Path, help="image to write (default: RUN/report.png)")
    options = parser.parse_args(argv)
    output = options.output or options.run / "report.png"

    def run() -> None:
        draw(read_records(options.run), options.run.name, output)
        print(output)

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
