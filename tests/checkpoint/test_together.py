"""All processes end a save or a load alike."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from checkpoint import store
from checkpoint.agreement import together
from checkpoint.folder import newest
from checkpoint.pieces import Piece
from checkpoint.run_state import RunState
from checkpoint.store import Retention
from errors import CheckpointRefused
from tests.checkpoint.ranks import Killed, on_ranks

KEEP = Retention(2)
STATE = RunState(1, 70, 700, 7, data={}, config={}, vocab_size=9)


class Full(dict[str, Piece]):
    """Pieces whose writing fails."""

    def items(self):
        raise OSError(28, "No space left on device")


class Broken(dict[str, Piece]):
    """Pieces with a fault of the program in them."""

    def items(self):
        raise RuntimeError("out of memory")


def row(rank, kind=dict):
    return kind({"a": Piece(torch.full((1, 3), float(rank)), (3, 3), (rank, 0))})


def save(folder, step, pieces=row, killed_at=0, **options):
    return on_ranks(
        3,
        lambda everyone: store.save(
            folder, pieces(everyone.rank), replace(STATE, step=step), keep=KEEP, everyone=everyone, **options
        ),
        killed_at,
    )


def names(folder):
    return {path.name for path in folder.iterdir()}


def assert_refused(outcomes, words):
    assert all(isinstance(each, CheckpointRefused) for each in outcomes), outcomes
    assert len({str(each) for each in outcomes}) == 1
    assert words in str(outcomes[0])


def test_a_rank_that_cannot_write_stops_all_and_leaves_what_was_there(tmp_path):
    save(tmp_path, 1)
    outcomes = save(tmp_path, 2, lambda rank: row(rank, Full if rank == 1 else dict))
    assert_refused(outcomes, "rank 1: [Errno 28] No space left on device; make room")
    assert names(tmp_path) == {"step_00000001", "latest"}
    assert store.read_tensors(tmp_path / "step_00000001")["a"].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert len(set(save(tmp_path, 2))) == 1


def test_several_ranks_that_cannot_write_are_counted(tmp_path):
    outcomes = save(tmp_path, 2, lambda rank: row(rank, Full if rank else dict))
    assert_refused(outcomes, "rank 1 (and 1 more of 3 ranks): [Errno 28]")


def test_a_host_that_does_not_see_the_folder_is_named(tmp_path):
    outcomes = on_ranks(
        2,
        lambda everyone: store.save(
            tmp_path / ("here" if everyone.rank == 0 else "there"),
            row(everyone.rank),
            STATE,
            keep=KEEP,
            everyone=everyone,
        ),
    )
    assert all("rank 1" in str(each) and "that every process can write" in str(each) for each in outcomes)
    assert names(tmp_path / "here") == set() and not (tmp_path / "there").exists()


def test_a_fault_of_the_program_on_one_rank_is_raised_there_and_refused_elsewhere(tmp_path):
    outcomes = save(tmp_path, 2, lambda rank: row(rank, Broken if rank == 2 else dict))
    assert isinstance(outcomes[2], RuntimeError)
    assert_refused(outcomes[:2], "rank 2: RuntimeError: out of memory")
    assert names(tmp_path) == set()


def test_rank_0_failing_at_the_start_stops_all(tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(save(tmp_path / "file", 1), "rank 0: ")


def test_rank_0_failing_at_the_end_stops_all(tmp_path):
    save(tmp_path, 1)
    assert_refused(save(tmp_path, 2, files={"nowhere/t.model": b"spm"}), "rank 0: [Errno 2]")
    assert names(tmp_path) == {"step_00000001", "latest"}


@pytest.mark.parametrize("fault", ["missing", "doubled"])
def test_a_missing_or_doubled_piece_is_a_fault_of_the_program(tmp_path, fault):
    outcomes = save(
        tmp_path, 2, lambda rank: row(1) if rank == 2 and fault == "doubled" else row(rank) if rank < 2 else {}
    )
    assert isinstance(outcomes[0], ValueError) and "do not cover it exactly once" in str(outcomes[0])
    assert_refused(outcomes[1:], "rank 0: ValueError: the pieces of a (3, 3)")
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("moment", "left"), [(1, ".step_00000002.part"), (2, ".step_00000002.part"), (3, "step_00000002")]
)
def test_processes_killed_between_two_phases_leave_whole_checkpoints_and_what_is_swept(tmp_path, moment, left):
    save(tmp_path, 1)
    outcomes = save(tmp_path, 2, killed_at=moment)
    assert all(isinstance(each, Killed) for each in outcomes)
    assert names(tmp_path) == {"step_00000001", "latest", left}
    found = newest(tmp_path)
    assert found is not None and store.read_tensors(found)["a"].shape == (3, 3)
    save(tmp_path, 3)
    assert "step_00000003" in names(tmp_path) and not list(tmp_path.glob(".*"))


def test_no_rank_returns_before_the_checkpoint_is_whole(tmp_path):
    def one(everyone):
        path = store.save(tmp_path, row(everyone.rank), STATE, keep=KEEP, everyone=everyone)
        return (tmp_path / "latest").read_text().strip() == path.name and (path / "state.json").is_file()

    assert on_ranks(3, one) == [True] * 3


def test_answers_come_in_the_order_of_ranks():
    assert on_ranks(3, lambda everyone: together(everyone, lambda: str(everyone.rank))) == [["0", "1", "2"]] * 3
    assert on_ranks(2, lambda everyone: together(everyone, lambda: None)) == [["", ""]] * 2


PROCESS = """
import sys
from pathlib import Path
import torch
from checkpoint import store
from checkpoint.pieces import Piece
from errors import CheckpointRefused
from parallel.process import joined
from parallel.ranks import Ranks
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
tensor = torch.arange(35.0).view(5, 7)
columns = [tensor[:, :4], tensor[:, 4:]][rank]
keep = store.Retention(1)
state = store.RunState(3, 0, 0, 0, data={}, config={}, vocab_size=9)
with joined(Ranks(rank, 2, rank, f"file://{folder}/meeting"), torch.device("cpu"), 60) as everyone:
    path = store.save(folder / "c", {"a": Piece(columns, (5, 7), (0, 4 * rank))}, state, keep=keep, everyone=everyone)
    rows = Piece(torch.zeros([3, 2][rank], 7), (5, 7), (3 * rank, 0))
    store.load(path, {"a": rows}, everyone)
    assert torch.equal(rows.local, tensor[3 * rank :][: len(rows.local)])
    if rank == 1:
        rows = Piece(rows.local.half(), rows.shape, rows.start)
    try:
        store.load(path, {"a": rows}, everyone)
    except CheckpointRefused as refusal:
        print(refusal)
"""


def test_two_real_processes_save_load_and_refuse_together(tmp_path):
    started = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0] == said[1] and said[0].startswith("rank 1: tensor a is (5, 7) torch.float32 in the checkpoint")
