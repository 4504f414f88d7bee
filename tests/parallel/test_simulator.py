"""Pipeline schedules: torch's lists are whole, and the simulator gives the known bubbles and activations."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.schedules import main
from parallel.action_lists import Action, action_lists, stage_ranks
from parallel.schedules import SCHEDULES
from parallel.simulator import Deadlock, Simulation, Times, chart, simulate
from tests.conftest import ROOT

EVEN = Times(1, 1, 1)
UNEVEN = Times(5, 6, 4)
SPLIT = [(name, v) for name, v in (("interleaved_zb", 1), ("interleaved_zb", 2), ("zbv", 2), ("dualpipev", 2))]
ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved_zb", 3), *SPLIT]
ACCEPTED = {
    "gpipe": lambda p, m: True,
    "1f1b": lambda p, m: m >= p,
    "interleaved": lambda p, m: m % max(1, m // p) == 0,
    "interleaved_zb": lambda p, m: m % max(1, m // p) == 0,
    "zbv": lambda p, m: True,
    "dualpipev": lambda p, m: m >= 2 * p,
}


def simulated(name: str, p: int, v: int, m: int, times: Times = EVEN) -> Simulation:
    return simulate(lists_of(name, p, v, m), stage_ranks(name, p, v), times)


@cache
def lists_of(name: str, p: int, v: int, m: int) -> list[list[Action]]:
    return action_lists(name, p, v, m)


def actions(text: str) -> list[Action]:
    """`F0.1` is the forward of stage 0 on micro-batch 1; a star: sent after the next computation."""
    words = [(word, *word.strip("*")[1:].split(".")) for word in text.split()]
    return [Action(w[0], int(s), int(m), sent_after=int(w[-1] == "*")) for w, s, m in words]  # type: ignore[arg-type]


def forwards_before_the_first_backward(row: list[Action]) -> int:
    return next(place for place, action in enumerate(row) if action.kind in "BI")


@pytest.mark.parametrize(("name", "v"), ALL)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_torch_takes_the_numbers_of_the_rule_and_gives_whole_lists_that_run(name: str, v: int, p: int) -> None:
    for m in range(1, 3 * p + 1):
        if not ACCEPTED[name](p, m):
            with pytest.raises(ValueError, match=rf"{name} with pp={p}.*{m} micro-batches: .*\w"):
                action_lists(name, p, v, m)
            continue
        done = [span.action for spans in simulated(name, p, v, m).spans for span in spans]
        known = set(done)
        assert len(known) == len(done)
        for stage, micro_batch in ((s, b) for s in range(p * v) for b in range(m)):
            kinds = {kind for kind in "FBIW" if Action(kind, stage, micro_batch) in known}  # type: ignore[arg-type]
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
            assert SCHEDULES[name].splits or "B" in kinds


@pytest.mark.parametrize(("name", "v"), SPLIT)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_weight_gradients_come_after_their_input_gradients(name: str, v: int, p: int) -> None:
    for row in lists_of(name, p, v, 2 * p):
        assert any(action.kind == "W" for action in row)
        for place, action in enumerate(row):
            if action.kind == "W":
                assert Action("I", action.stage, action.micro_batch) in row[:place]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("times", [EVEN, UNEVEN])
@pytest.mark.parametrize("p", range(2, 9))
def test_gpipe_and_1f1b_idle_p_less_one_over_m(name: str, times: Times, p: int) -> None:
    for m in range(p, 4 * p + 1):
        simulation = simulated(name, p, 1, m, times)
        assert simulation.bubble == (p - 1) / m
        assert simulation.idle[0] / simulation.total == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("times", [EVEN, UNEVEN])
@pytest.mark.parametrize("p", range(2, 7))
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(times: Times, p: int, v: int) -> None:
    for m in range(p, 4 * p + 1, p):
        assert simulated("interleaved", p, v, m, times).bubble == (p - 1) / (v * m)


@pytest.mark.parametrize("times", [EVEN, UNEVEN, Times(3, 2, 2)])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_zero_bubble_idles_as_zb_h1_in_the_times_of_a_stage(times: Times, p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        simulation = simulated("interleaved_zb", p, v, m, times)
        idle = (p - 1) * (times.forward + times.backward_input - times.backward_weight)
        assert simulation.total - max(simulation.busy) == idle
        assert max(simulation.in_flight_weights) == p * v  # the memory of 1f1b


@pytest.mark.parametrize("times", [EVEN, UNEVEN, Times(2, 2, 1), Times(1, 1, 2)])
@pytest.mark.parametrize(("name", "v"), SPLIT)
def test_zero_bubble_schedules_idle_less_than_1f1b(times: Times, name: str, v: int) -> None:
    for p in (2, 3, 4, 8):
        for m in (p, 2 * p, 3 * p):
            if ACCEPTED[name](p, m):
                assert simulated(name, p, v, m, times).bubble < simulated("1f1b", p, 1, m, times).bubble


@pytest.mark.parametrize("p", range(2, 9))
def test_1f1b_warms_up_and_holds_less_towards_the_last_rank(p: int) -> None:
    for m in range(p, 3 * p):
        lists = lists_of("1f1b", p, 1, m)
        # One more than the warm-up: the steady state begins with a forward.
        assert [forwards_before_the_first_backward(row) for row in lists] == [(p - r - 1) + 1 for r in range(p)]
        assert simulated("1f1b", p, 1, m).in_flight == tuple(p - r for r in range(p))
        assert simulated("gpipe", p, 1, m).in_flight == (m,) * p


@pytest.mark.parametrize("p", range(2, 7))
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_warms_up_and_holds_as_the_closed_forms_say(p: int, v: int) -> None:
    for m in range(p, 4 * p + 1, p):
        warm = [min(2 * (p - r - 1) + (v - 1) * p, m * v) for r in range(p)]
        lists = lists_of("interleaved", p, v, m)
        # No forward is left for the steady state where all were made in the warm-up.
        assert [forwards_before_the_first_backward(row) for row in lists] == [min(w + 1, m * v) for w in warm]
        if m >= 2 * p:
            held = simulated("interleaved", p, v, m).in_flight[0]
            assert Fraction(held, v) == p * (1 + Fraction(p - 1, p * v))


def test_a_step_of_two_ranks_is_as_worked_out_by_hand() -> None:
    simulation = simulated("1f1b", 2, 1, 2)
    times = [[(str(span.action)[0], span.start, span.end) for span in spans] for spans in simulation.spans]
    assert times == [
        [("F", 0, 1), ("F", 1, 2), ("B", 4, 6), ("B", 7, 9)],
        [("F", 1, 2), ("B", 2, 4), ("F", 4, 5), ("B", 5, 7)],
    ]
    assert (simulation.total, simulation.busy, simulation.idle, simulation.bubble) == (9, (6, 6), (3, 3), 0.5)
    assert chart(simulation) == "rank 0 01..aa.bb\nrank 1 .0aa1bb.."
    assert chart(simulation, unit=2) == "rank 0 1.ab.\nrank 1 0ab.."  # what runs in each middle


def test_a_split_backward_with_transfers_is_as_worked_out_by_hand() -> None:
    lists = [actions("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1"), actions("F1.0 I1.0 W1.0 F1.1 B1.1")]
    simulation = simulate(lists, [0, 1], Times(2, 3, 1, transfer=0.5))
    assert [[(span.start, span.end) for span in spans] for spans in simulation.spans] == [
        [(0, 2), (2, 4), (8, 11), (15, 18), (18, 19), (19, 20)],
        [(2.5, 4.5), (4.5, 7.5), (7.5, 8.5), (8.5, 10.5), (10.5, 14.5)],
    ]
    assert (simulation.in_flight, simulation.in_flight_weights) == ((2, 1), (2, 1))
    late = [actions("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")]
    assert simulate(late, [0], EVEN).in_flight == (1,)
    assert simulate(late, [0], EVEN).in_flight_weights == (2,)


def test_a_result_that_is_sent_after_the_next_computation_arrives_after_it() -> None:
    ranks = [0, 1, 1, 0]
    at_once = simulate([actions("F0.0 F0.1"), actions("F1.0 F2.0")], ranks, EVEN)
    late = simulate([actions("F0.0* F0.1"), actions("F1.0* F2.0")], ranks, EVEN)
    assert [span.start for span in at_once.spans[1]] == [1, 2]
    assert [span.start for span in late.spans[1]] == [2, 3]  # within a rank nothing is sent


def test_only_dualpipev_sends_results_late() -> None:
    late = {name for name, v in ALL for row in lists_of(name, 4, v, 8) for action in row if action.sent_after}
    assert late == {"dualpipev"}
    assert simulated("dualpipev", 4, 2, 8).total == 54  # 51 if each result left at once


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (
            ["B0.0 F0.0", "F1.0 B1.0"],
            ["rank 0 cannot run B(stage 0, micro-batch 0)", "F(stage 0, micro-batch 0) and I(stage 1", "rank 1 cannot"],
        ),
        (
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
            ["rank 0 cannot run B(stage 0", "rank 1 cannot run F(stage 1"],
        ),
        (["F0.0 W0.0 I0.0"], ["rank 0 cannot run W(stage 0, micro-batch 0) for lack of I(stage 0, micro-batch 0)"]),
    ],
)
def test_a_wrong_order_is_reported_with_what_is_stuck(lists: list[str], words: list[str]) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate([actions(row) for row in lists], range(len(lists)), EVEN)
    assert all(word in str(caught.value) for word in words)


def test_an_order_that_is_only_slow_is_no_deadlock() -> None:
    lists = [actions("F0.0 F0.1 B0.1 B0.0"), actions("F1.0 B1.0 F1.1 B1.1")]
    assert simulate(lists, [0, 1], EVEN).total == 11


def test_a_computation_that_comes_twice_or_on_a_wrong_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 does F\(stage 0, micro-batch 0\) again"):
        simulate([actions("F0.0 F0.0")], [0], EVEN)
    with pytest.raises(ValueError, match=r"rank 0 does W\(stage 0, micro-batch 0\) again"):
        simulate([actions("F0.0 B0.0 W0.0")], [0], EVEN)
    with pytest.raises(ValueError, match=r"rank 0 does F\(stage 1, micro-batch 0\), but does not have that stage"):
        simulate([actions("F1.0"), []], [0, 1], EVEN)


@pytest.mark.parametrize("values", [(-1, 1, 1), (float("nan"), 1, 1), (1, float("inf"), 1), (0, 0, 0), (1, 1, 1, -1)])
def test_impossible_times_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="times must be"):
        Times(*values)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(ALL),
    st.integers(2, 4),
    st.integers(1, 3),
    st.builds(Times, *[st.integers(1, 1000).map(lambda n: n / 8)] * 3, st.integers(0, 100).map(lambda n: n / 8)),
)
def test_every_dependency_holds_and_no_rank_runs_two_things_at_once(
    schedule: tuple[str, int], p: int, rounds: int, times: Times
) -> None:
    (name, v), m = schedule, p * rounds
    if not ACCEPTED[name](p, m):
        m = 2 * p
    simulation = simulated(name, p, v, m, times)
    assert simulation.total >= max(simulation.busy)
    rank = stage_ranks(name, p, v)
    end = {(a.kind, a.stage, a.micro_batch): e for spans in simulation.spans for a, _, e in spans}
    for spans in simulation.spans:
        assert all(one.end <= next_.start for one, next_ in pairwise(spans))
        for (kind, s, b), start in (((a.kind, a.stage, a.micro_batch), start) for a, start, _ in spans):
            if kind == "W":
                assert end["I", s, b] <= start
                continue
            neighbour = s - 1 if kind == "F" else s + 1
            moving = times.transfer if 0 <= neighbour < p * v and rank[neighbour] != rank[s] else 0
            if kind == "F":
                assert s == 0 or end["F", s - 1, b] + moving <= start
            else:
                gradient = end.get(("B", s + 1, b), end.get(("I", s + 1, b)))
                assert end["F", s, b] <= start
                assert (gradient is None) == (s == p * v - 1)
                assert gradient is None or gradient + moving <= start


def test_the_table_has_a_line_a_schedule_with_its_numbers_or_the_reason_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--micro-batches", "6", "--chart", "1f1b"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert list(lines)[1:7] == list(SCHEDULES)
    assert lines["1f1b"].split()[1:] == ["1", "50.00%", "27", "4", "4"]
    assert "at least as many microbatches as stages" in lines["dualpipev"]
    assert "rank" in lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--times", "1,2"], "three or four numbers"),
        (["--times", "1,x,1"], "'x'"),
        (["--times", "1,1,-1"], "from 0 up"),
        (["--pp", "0"], "at least 1"),
        (["--chart", "nan"], "nan"),
        (["--chart", "zbv", "--vpp", "3"], "this schedule has two stages a rank"),
    ],
)
def test_wrong_options_are_answered_in_words(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(options)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_the_command_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "launch.schedules", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "--micro-batches" in answer.stdout
