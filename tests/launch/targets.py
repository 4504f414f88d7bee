"""What the ranks of test_spawn.py do."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist

from errors import CheckpointRefused, ConfigRefused
from parallel.process import joined
from parallel.ranks import Ranks

CPU = torch.device("cpu")
TEXTS = ["", "plain", "größer, 炉", "x" * 1000]


def place(ranks: Ranks, word: str) -> tuple[int, int, int, str]:
    return ranks.rank, ranks.world, ranks.local_rank, word


def surroundings(ranks: Ranks) -> tuple[int, str, str | None]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ.get("FROM_THE_CALLER")


def agreements(ranks: Ranks) -> tuple[float, list[int], list[str], list[str], str]:
    with joined(ranks, CPU, 60) as everyone:
        number = torch.tensor(float(ranks.rank))
        dist.all_reduce(number)
        everyone.require_same("the word", "same")
        refusal = "none"
        try:
            everyone.require_same("the number of files", f"{ranks.rank // 2}")
        except ConfigRefused as refused:
            refusal = str(refused)
        everyone.barrier()
        added, texts = everyone.add([ranks.rank, 1, 2**40]), everyone.gather(TEXTS[ranks.rank])
        return number.item(), added, texts, everyone.gather(""), refusal


def tensor(ranks: Ranks) -> torch.Tensor:
    return torch.full((1000, 1000), float(ranks.rank))


def one_fails(ranks: Ranks, failing: int) -> None:
    """All wait in a collective for the one that never comes."""
    with joined(ranks, CPU, 60):
        dist.barrier()
        if ranks.rank == failing:
            print("something odd in layer 17")
            raise ValueError("the odd one")
        dist.all_reduce(torch.ones(1))


def one_refuses(ranks: Ranks) -> None:
    with joined(ranks, CPU, 60):
        if ranks.rank == 1:
            raise CheckpointRefused("step_7 is damaged; remove it")
        dist.all_reduce(torch.ones(1))


def one_dies(ranks: Ranks, how: str) -> None:
    with joined(ranks, CPU, 60):
        dist.barrier()
        if ranks.rank == 2:
            print("on the way out", file=sys.stderr)
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def one_leaves_early(ranks: Ranks) -> None:
    with joined(ranks, CPU, 60):
        dist.barrier()
        if ranks.rank:
            dist.all_reduce(torch.ones(1))


def one_never_comes(ranks: Ranks) -> None:
    with joined(ranks, CPU, 3):
        dist.barrier()
        if ranks.rank == 1:
            forgotten_here()
        dist.all_reduce(torch.ones(1))


def one_hangs(ranks: Ranks) -> None:
    if ranks.rank == 1:
        forgotten_here()


def dies_after_its_result(ranks: Ranks) -> str:
    if ranks.rank == 1:
        Finalize(None, os._exit, args=(9,), exitpriority=1)
    return "a result"


def forgotten_here() -> None:
    time.sleep(600)


def one_fails_and_the_others_ignore_sigterm(ranks: Ranks) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with joined(ranks, CPU, 60):
        dist.barrier()
        if ranks.rank == 1:
            raise ValueError("the odd one")
        time.sleep(600)


def unpicklable(ranks: Ranks) -> object:
    return lambda: 0


def speaks(ranks: Ranks) -> None:
    print(f"this is rank {ranks.rank}")


def leave_pid(ranks: Ranks, folder: Path) -> None:
    (folder / f"{ranks.rank}").write_text(str(os.getpid()))
    time.sleep(600)
