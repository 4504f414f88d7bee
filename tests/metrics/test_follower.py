"""How starts end on processes that do not lead."""

import json

import pytest

from errors import ConfigRefused, DataRefused, PeerLost
from metrics.follower import Follower
from metrics.run_directory import RunDirectory
from metrics.sinks import Console


def status(directory):
    found = json.loads(directory.status_file.read_text())
    return found["state"], found["code"]


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path)
    made.write_status("running", None, 3, 1)
    return made


def ended(directory, error, joined, first_on_host=False):
    with pytest.raises(type(error)), Follower(directory, 2, first_on_host) as follower:
        follower.joined = joined
        raise error


def test_what_ends_one_process_alone_is_told_and_recorded_by_it(directory, capsys):
    ended(directory, DataRefused("token 99 is too large"), joined=True)
    assert capsys.readouterr().err == "rank 2: token 99 is too large\n"
    assert status(directory) == ("refused", 3)


def test_the_leader_who_lost_it_lets_its_word_stand(directory):
    ended(directory, DataRefused("token 99 is too large"), joined=True)
    directory.note_step(5, 1)
    with pytest.raises(PeerLost), directory.attempt(Console(silent=True)):
        raise PeerLost("rank 0 lost another process")
    assert status(directory) == ("refused", 3)


def test_a_leader_that_nobody_told_records_the_loss(directory):
    with pytest.raises(PeerLost), directory.attempt(Console(silent=True)):
        raise PeerLost("rank 0 lost another process")
    assert status(directory) == ("failed", 1)


def test_what_ends_all_is_left_to_the_leader_and_waited_for(directory, capsys, monkeypatch):
    told = iter([False, False, True])

    def sleep(_):
        if next(told):
            directory.write_status("refused", 2, 3, 1)

    monkeypatch.setattr("metrics.follower.time.sleep", sleep)
    ended(directory, ConfigRefused("the processes differ"), joined=True)
    assert capsys.readouterr().err == "" and next(told, None) is None


def test_before_the_processes_join_the_first_of_a_host_tells_what_its_host_lacks(directory, capsys, monkeypatch):
    ended(directory, DataRefused("no corpus here"), joined=False, first_on_host=True)
    assert capsys.readouterr().err == "rank 2: no corpus here\n"
    assert status(directory) == ("running", None)


def test_a_leader_that_says_nothing_is_spoken_for(directory, capsys, monkeypatch):
    monkeypatch.setattr("metrics.follower._LEADER_SECONDS", 0.1)
    ended(directory, ConfigRefused("no GPU of its own"), joined=False)
    assert capsys.readouterr().err == "rank 2: no GPU of its own\n"
    ended(directory, PeerLost("rank 2 lost another process"), joined=True)
    assert capsys.readouterr().err == "rank 2: rank 2 lost another process\n"
    assert status(directory) == ("failed", 1)
