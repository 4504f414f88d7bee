"""Drills under torchrun: hangs and NaN made on purpose are named rightly, and the run comes back by itself."""

import random
import re

import pytest

import train
from launch import replay
from tests.conftest import losses, records
from tests.test_comes_back import events, status
from tests.test_layouts_end_to_end import SHAPE, close, torchrun
from tests.test_train import run_of

LIMITS = ["health.limits.compute=4", "health.limits.data=4", "health.limits.start=60"]
PHASES = ("data", "forward", "backward", "optimizer")


@pytest.fixture
def wide(tiny):
    return [*(o for o in tiny if "micro_batch" not in o), *SHAPE, "train.micro_batch=2"]


def inject(*faults):
    """The override that makes faults happen."""
    told = ("{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}" for each in faults)
    return f"debug.inject=[{', '.join(told)}]"


def drill(ranks, restarts, *overrides):
    """A run that torchrun starts again as often as asked."""
    return torchrun(ranks, *overrides, before=("--max-restarts", str(restarts)), timeout=1500)


def named(run, attempt):
    """Ranks that the watchdog of a start named."""
    words = (run / "hang" / str(attempt) / "culprits.txt").read_text()
    found = re.search(r"rank ([\d, ]+) (?:holds|did not)", words)
    return [int(each) for each in found[1].split(",")] if found else words


def test_a_hang_and_a_nan_are_named_the_run_goes_on_and_the_fault_can_be_made_again(wide, capsys):
    faults = inject(
        {"kind": "hang", "step": 9, "rank": 1, "phase": "backward"},
        {"kind": "nan", "step": 11, "rank": 1, "layer": 1, "micro_batch": 2, "attempt": 2},
    )
    done = drill(2, 1, *wide, *LIMITS, faults)
    assert done.returncode == 0, done.stdout + done.stderr
    run = run_of(wide)
    assert named(run, 1) == [1] and "holds it up" in done.stderr
    assert {each.name for each in (run / "hang" / "1").iterdir()} >= {"rank_00000.stacks.txt", "rank_00001.stacks.txt"}
    assert [r["step"] for r in events(run, "resume")] == [6] and status(run)["attempt"] == 2
    (fault,) = events(run, "fault")
    assert (fault["step"], fault["rank"], fault["module"], fault["micro_batch"]) == (11, 1, "layers.1", 2)
    ledger = [r["goodput"] for r in records(run) if "goodput" in r][-1]
    assert ledger["recomputed"] > 0 and ledger["startup"] > 0 and 0 < ledger["ettr"] < 1
    assert replay.main([fault["path"]]) == 0
    assert "layers.1" in capsys.readouterr().out


def test_what_has_ended_for_good_is_not_started_again(wide):
    """torchrun starts again after every code but 0."""
    done = drill(2, 1, *wide, "train.max_hours=1e-9")
    assert (done.returncode, status(run_of(wide))["attempt"]) == (75, 1), done.stdout + done.stderr
    assert done.stderr.count("it is not started again") >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout", [["parallel.tp=2"], ["parallel.pp=2", "parallel.zero=3"]], ids=["tp2 dp2", "pp2 dp2"]
)
def test_hangs_by_ten_seeds_are_named(wide, layout):
    draw = random.Random(repr(layout))
    drawn = [(draw.randrange(4), draw.choice(PHASES), draw.randrange(2, 6)) for _ in range(10)]
    faults = [
        {"kind": "hang", "step": 6 + step, "rank": rank, "phase": phase, "attempt": attempt}
        for attempt, (rank, phase, step) in enumerate(drawn, 1)
    ]
    # The first start saves at step 6; all others go on from there.
    faults[0]["step"] = 8
    done = drill(4, 12, *wide, *LIMITS, *layout, "checkpoint.every=6", inject(*faults))
    assert done.returncode == 0, done.stdout + done.stderr
    run = run_of(wide)
    assert [named(run, attempt) for attempt in range(1, 11)] == [[rank] for rank, _, _ in drawn], drawn
    assert train.main([*wide, "run.name=one"]) == 0
    close(run, run_of(wide, "one"), 1e-5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout", [["parallel.tp=2"], ["parallel.pp=2", "parallel.zero=3"]], ids=["tp2 dp2", "pp2 dp2"]
)
def test_nans_by_twenty_seeds_are_named(wide, layout):
    draw, faults = random.Random(repr(layout)), []
    for seed in range(20):
        rank = draw.randrange(4)
        layer = draw.randrange(2) + 2 * (rank // 2) if "pp" in layout[0] else draw.randrange(4)
        faults.append(
            {"kind": "nan", "step": 2 * seed + 2, "rank": rank, "layer": layer, "micro_batch": draw.randrange(4)}
        )
    done = drill(4, 0, *wide, *layout, "train.steps=42", "health.locate=20", inject(*faults))
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(r["step"], r["rank"], r["module"], r["micro_batch"]) for r in events(run_of(wide), "fault")]
    assert found == [(f["step"], f["rank"], f"layers.{f['layer']}", f["micro_batch"]) for f in faults]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_rank_that_works_three_times_as_much_is_named(wide):
    for rank in (0, 3):
        slow = {"kind": "slow", "step": 1, "rank": rank, "phase": "forward", "factor": 3}
        done = drill(4, 0, *wide, f"run.name=slow{rank}", "train.steps=120", inject(slow))
        assert done.returncode == 0, done.stdout + done.stderr
        assert {r["rank"] for r in events(run_of(wide, f"slow{rank}"), "straggler")} == {rank}


CLEAN = {
    "dp4": [], "dp4 zero3": ["parallel.zero=3"], "tp2": ["parallel.tp=2"], "pp2": ["parallel.pp=2"],
    "cp2": ["parallel.cp=2"],
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", CLEAN)
def test_clean_runs_raise_no_alarm(wide, layout):
    """Four of each layout, twenty in all."""
    for seed in range(4):
        words = [f"run.name=clean{seed}", f"run.seed={seed}", "train.steps=120", "metrics.replica_check=20"]
        done = drill(4, 0, *wide, *LIMITS, *CLEAN[layout], *words, "health.window=20")
        assert done.returncode == 0, done.stdout + done.stderr
        run = run_of(wide, f"clean{seed}")
        alarms = [r for r in records(run) if r.get("event") in ("straggler", "spike", "fault", "replicas", "skip")]
        assert not alarms and not (run / "hang").exists()
        assert len(losses(run)) == 120
