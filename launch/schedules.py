"""python -m launch.schedules: how long each pipeline schedule takes, idles and what it holds, without a process."""

from __future__ import annotations

import argparse
import sys

from errors import ConfigRefused, exit_code_of
from parallel.action_lists import action_lists, stage_ranks
from parallel.schedules import SCHEDULES
from parallel.simulator import Simulation, Times, chart, simulate

_HEADER = f"{'schedule':<15}{'stages':>7}{'bubble':>9}{'total':>9}{'in flight: first':>18}{'worst':>7}"
_NOTES = """
stages     of a rank
bubble     time above a rank's own work, as a share of that work
total      time of a step, in the unit of --times
in flight  most micro-batches at once whose activations of a rank's layers are held, from their forward to their
           weight gradient, on the first rank and on the worst; a stage's are its share of the rank's layers"""
_LEGEND = "digit: forward of a micro-batch, letter: backward (capital: weights alone), dot: idle"
_WIDEST = 160  # characters of a chart


def run(name: str, options: argparse.Namespace) -> tuple[int, Simulation]:
    """Stages a rank of a schedule, and its simulation.

    The times of a rank's layers are shared by its stages, so that all schedules train one model.

    Raises:
        ValueError: the schedule cannot take these numbers.
    """
    per_rank = options.vpp if SCHEDULES[name].several else 1
    lists = action_lists(name, options.pp, per_rank, options.micro_batches)
    return per_rank, simulate(lists, stage_ranks(name, options.pp, per_rank), _share(options.times, per_rank))


def table(options: argparse.Namespace) -> str:
    """A line a schedule: its numbers, or why it has none."""
    return "\n".join([_HEADER, *(_line(name, options) for name in SCHEDULES)])


def _line(name: str, options: argparse.Namespace) -> str:
    try:
        per_rank, simulation = run(name, options)
    except ValueError as error:
        return f"{name:<15}{str(error).removeprefix(name).lstrip()}"
    held = simulation.in_flight_weights
    first, worst = held[0] / per_rank, max(held) / per_rank
    return f"{name:<15}{per_rank:>7}{simulation.bubble:>9.2%}{simulation.total:>9.6g}{first:>18g}{worst:>7g}"


def _share(times: Times, stages: int) -> Times:
    """Times of one of a rank's stages."""
    return Times(times.forward / stages, times.backward_input / stages, times.backward_weight / stages, times.transfer)


def _drawn(options: argparse.Namespace) -> str:
    """The chart that was asked for."""
    try:
        per_rank, simulation = run(options.chart, options)
    except ValueError as error:
        raise ConfigRefused(f"no chart: {error}") from error
    part = _share(options.times, per_rank)
    shortest = min(time for time in (part.forward, part.backward_input, part.backward_weight) if time > 0)
    unit = max(shortest, simulation.total / _WIDEST)
    return f"{options.chart}, a character is {unit:g}; {_LEGEND}\n{chart(simulation, unit)}"


def _times(text: str) -> Times:
    """From the option; argparse shows the words of a refusal."""
    try:
        values = [float(value) for value in text.split(",")]
        if not 3 <= len(values) <= 4:
            raise ValueError(f"three or four numbers are needed, these are {len(values)}")
        return Times(*values)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.schedules", description=__doc__, epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (4)")
    parser.add_argument("--vpp", type=int, default=2, help="stages a rank, where a schedule has several (2)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, on one data-parallel rank (8)")
    parser.add_argument(
        "--times", type=_times, default=Times(), metavar="F,I,W[,P2P]",
        help="forward, input gradient and weight gradient of a rank's layers on one micro-batch, and of moving a "
        "result to the next rank (1,1,1,0)",
    )  # fmt: skip
    parser.add_argument("--chart", choices=list(SCHEDULES), help="draw this schedule too")
    options = parser.parse_args(argv)
    if min(options.pp, options.vpp, options.micro_batches) < 1:
        parser.error("--pp, --vpp and --micro-batches must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line; a refusal is a message and its exit code."""
    options = _options(argv)
    print(table(options) + "\n" + _NOTES)
    return exit_code_of(lambda: print("\n" + _drawn(options)) if options.chart else None)


if __name__ == "__main__":
    sys.exit(main())
