"""What watches over a run: who holds it up, who is slow, what time was used for; and faults made on purpose."""

import json
import random
import statistics
import sys
import threading
from pathlib import Path

import pytest

from metrics.clock import PARTS
from metrics.goodput import Goodput
from metrics.health_config import HealthConfig
from metrics.inject import Injector
from metrics.inject_config import DebugConfig, InjectConfig
from metrics.stragglers import WINDOW, slow_ranks
from metrics.watchdog import Report, culprit_words, culprits, waiting_in


def report(rank, *, step=5, parts=3, collective=None):
    return Report(rank, step, parts, "forward", 9.0, collective, "engine.py:7 in step")


def test_the_rank_that_does_not_wait_is_the_culprit():
    reports = [report(0, collective="all_reduce"), report(1), report(2, collective="all_reduce")]
    assert culprits(reports, 3) == ([reports[1]], [])
    assert "rank 1 holds it up" in culprit_words(reports, 3) and "not in a collective" in culprit_words(reports, 3)


def test_a_rank_that_does_not_report_is_the_culprit_before_all_others():
    assert culprits([report(0), report(2, collective="recv")], 3) == ([], [1])
    assert "rank 1 did not even report" in culprit_words([report(0), report(2)], 3)


def test_where_all_wait_those_that_have_come_least_far_are_the_culprits():
    reports = [report(rank, parts=4 - (rank == 2), collective="barrier") for rank in range(4)]
    assert culprits(reports, 4) == ([reports[2]], [])
    assert "no rank is behind another" in culprit_words([report(rank) for rank in range(2)], 2)


def test_a_thread_that_waits_for_work_of_a_collective_is_told_from_one_that_computes():
    assert waiting_in(None)[0] is None
    collective, place = waiting_in(sys._getframe())
    assert collective is None and "test_watching_over.py" in place
    inside, over, seen = threading.Event(), threading.Event(), []

    def wait():
        inside.set()
        over.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait()
    frame = sys._current_frames().get(thread.ident or 0)
    while frame and (frame.f_code.co_name != "wait" or "threading" in frame.f_code.co_filename):
        frame = frame.f_back
    seen.append(waiting_in(frame)[0])
    over.set()
    thread.join()
    assert seen == ["over.wait(20)"]


def synthetic(rng, ranks):
    """Steps' work of ranks: what a step costs all, each rank's own noise, now and then a disturbance."""
    steps = [rng.uniform(0.8, 1.4) for _ in range(WINDOW)]
    disturbed = [[2.0 if rng.random() < 0.03 else 1.0 for _ in steps] for _ in range(ranks)]
    return [[step * rng.gauss(1.0, 0.04) * extra for step, extra in zip(steps, own, strict=True)] for own in disturbed]


def recorded():
    """Windows of the steps' work of four ranks of a run (dp 4, 400 steps of 0.15 s) on two cores, in microseconds."""
    every = json.loads((Path(__file__).parent / "rank_times.json").read_text())
    for begin in range(0, len(every[0]) - WINDOW + 1, 4):
        yield [own[begin : begin + WINDOW] for own in every]


@pytest.mark.parametrize("kind", ["synthetic", "recorded"])
def test_a_rank_that_is_a_tenth_slower_is_named_and_no_other(kind):
    """The margin lies between the noise and the tenth: precision and recall of windows with a slow rank and without."""
    rng, margin = random.Random(0), HealthConfig().straggler
    right = wrong = missed = 0
    for window in recorded() if kind == "recorded" else (synthetic(rng, 8) for _ in range(200)):
        slow, peers = rng.randrange(len(window)), [0] * len(window)
        window = [[each * (1.1 if rank == slow else 1.0) for each in own] for rank, own in enumerate(window)]
        found = slow_ranks(window, peers, margin)
        right, wrong, missed = right + (slow in found), wrong + len(found.keys() - {slow}), missed + (slow not in found)
        window[slow] = [each / 1.1 for each in window[slow]]
        wrong += len(slow_ranks(window, peers, margin))
    assert right / (right + missed) >= 0.95 and right / (right + wrong) >= 0.95, (right, wrong, missed)


def test_ranks_of_other_stages_are_no_peers():
    seconds = [[1.0] * 5, [3.0] * 5, [1.0] * 5, [3.3] * 5]
    assert slow_ranks(seconds, [0, 1, 0, 1], 1.08) == pytest.approx({3: 1.1})
    assert slow_ranks([[1.0], [9.0]], [0, 1], 1.1) == {}


def parts(**seconds):
    return dict.fromkeys(PARTS, 0.0) | seconds


def test_the_ledger_adds_up_over_restarts(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("metrics.goodput.time.time", lambda: now[0])
    records = tmp_path / "metrics.jsonl"
    first = Goodput(records, began=90.0)
    first.begin()
    first.add(1, 4, 10.0, parts(checkpoint=1.0, data=2.0, evaluation=3.0))
    now[0] = 120.0
    records.write_text(json.dumps({"step": 4, "goodput": first.summary()}) + '\n{"event": "skip"}\n{"goodput": {"pro')
    now[0] = 160.0
    second = Goodput(records, began=150.0)
    second.begin()
    second.add(3, 6, 8.0, parts())
    found = second.summary()
    assert found == pytest.approx(
        {
            "productive": 4.0 + 4.0, "recomputed": 4.0, "saving": 1.0, "data": 2.0, "evaluation": 3.0,
            "startup": 20.0, "down": 30.0, "ettr": 8.0 / 68.0, "furthest": 6, "until": 160.0,
        }
    )  # fmt: skip
    assert "down 44%" in second.words()
    records.unlink()
    assert sum(Goodput(records, began=0.0).seconds.values()) == 0.0


def test_a_fault_happens_at_its_step_part_rank_and_start_alone(tmp_path):
    said: list[str] = []
    fault = InjectConfig("corrupt", step=4, rank=1)
    file = tmp_path / "tensors"
    for rank, attempt, step in ((0, 1, 4), (1, 2, 4), (1, 1, 3), (1, 1, 4)):
        file.write_bytes(b"0" * 9)
        Injector(DebugConfig((fault,)), rank, attempt, said.append).after_save(step, tmp_path)
        assert (file.read_bytes() != b"0" * 9) == ((rank, attempt, step) == (1, 1, 4))
    assert said == ["debug.inject: corrupt at step 4 on rank 1"]
    full = Injector(DebugConfig((InjectConfig("disk_full", step=4),)), 0, 1, said.append)
    assert [full.disk_full(step) for step in (3, 4)] == [False, True]


def test_a_slow_rank_works_longer_in_its_part():
    import time

    ratios = []
    for factor in (1.5, 4.0):
        injector = Injector(DebugConfig((InjectConfig("slow", step=2, factor=factor),)), 0, 1, print)
        injector.begin_step(3)
        injector.begins("forward")
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        injector.ends("forward")
        ratios.append((time.thread_time() - began) / 0.02)
    assert statistics.mean(ratios) == pytest.approx(2.75, rel=0.3)
