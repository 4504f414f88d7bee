"""Which of how many processes: torchrun's and Slurm's variables."""

import pytest

from errors import ConfigRefused
from parallel.ranks import Ranks, find_ranks, first_host

SLURM = {
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip


def test_without_variables_there_is_one_process():
    assert find_ranks({}) == Ranks()
    assert find_ranks({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Ranks()


def test_torchruns_variables():
    found = find_ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (found.rank, found.world, found.local_rank, found.local_world) == (5, 8, 1, 4)
    assert found.rendezvous == "env://"


def test_slurms_variables_and_a_meeting_that_follows_from_them():
    found = find_ranks(SLURM)
    assert (found.rank, found.world, found.local_rank) == (9, 16, 1)
    assert found.rendezvous.startswith("tcp://gpu007:")
    assert find_ranks(SLURM | {"SLURM_PROCID": "2"}).rendezvous == found.rendezvous
    assert find_ranks(SLURM | {"SLURM_STEP_ID": "4"}).rendezvous != found.rendezvous
    given = find_ranks(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert given.rendezvous == "tcp://10.0.0.1:1234"


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("gpu[007-012,020],login1", "gpu007"), ("a[3,5]b,c", "a3b"), ("", ""),
        ("rack-2-n[10-11]", "rack-2-n10"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"WORLD_SIZE": "4"}, "RANK=None"), ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK=x"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "process 4 of 4"),
        ({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "process 0 of 0"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "MASTER_ADDR"), ({**SLURM, "SLURM_PROCID": "-1"}, "SLURM_PROCID=-1"),
    ],
)  # fmt: skip
def test_broken_variables_are_refused_in_words(variables, words):
    with pytest.raises(ConfigRefused, match=words):
        find_ranks(variables)
