"""How processes meet."""

import datetime

from torch._C._distributed_c10d import TCPStore

from parallel.process import meeting
from parallel.ranks import Ranks


def test_a_start_does_not_meet_the_processes_of_the_one_before_in_the_store_that_torchrun_keeps(monkeypatch):
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    limit = datetime.timedelta(seconds=5)

    def start(number: int, rank: int, world: int = 2):
        for key, value in (("TORCHELASTIC_RESTART_COUNT", number), ("RANK", rank), ("WORLD_SIZE", world)):
            monkeypatch.setenv(key, str(value))
        return meeting(Ranks(rank, world, rank, "env://", "torchrun", world), limit)

    start(0, rank=1).set("address", "dead")
    assert start(0, rank=0).get("address") == b"dead", "those of one start meet"
    assert not start(1, rank=0).check(["address"])
    assert not start(0, rank=0, world=1).check(["address"]), "fewer hosts, and no crash counted"
