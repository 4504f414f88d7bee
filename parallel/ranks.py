"""Which of how many processes this is, from torchrun's or Slurm's variables (no torch here)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from errors import ConfigRefused

_PORTS = range(20000, 60000)


@dataclass(frozen=True)
class Ranks:
    """This process's place among those of the run."""

    rank: int = 0
    """Number of this process, from 0."""
    world: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process on its host, which is its GPU's number."""
    rendezvous: str = ""
    """Where the processes meet, as torch.distributed's init_method."""
    source: str = "one process"
    """Who started them, in words."""
    local_world: int = 1
    """Processes that share the cores this one may use; Slurm has shared them out already."""


def find_ranks(environ: Mapping[str, str]) -> Ranks:
    """Ranks as torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS) gave them.

    Raises:
        ConfigRefused: a variable is missing or not a number.
    """
    if "RANK" in environ or int(_number(environ, "WORLD_SIZE", "1")) > 1:
        rank, world, local = (int(_number(environ, key)) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        sharing = int(_number(environ, "LOCAL_WORLD_SIZE", "1"))
        return _checked(Ranks(rank, world, local, "env://", "torchrun", sharing))
    if int(_number(environ, "SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, world, local = (
            int(_number(environ, key)) for key in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        )
        return _checked(Ranks(rank, world, local, _slurm_meeting(environ), "srun"))
    return Ranks()


def _checked(ranks: Ranks) -> Ranks:
    if ranks.rank >= ranks.world:
        raise ConfigRefused(
            f"{ranks.source} says that this is process {ranks.rank} of {ranks.world}; numbers run from 0 to one less "
            "than there are: start all processes with one command"
        )
    return ranks


def _number(environ: Mapping[str, str], key: str, default: str | None = None) -> str:
    value = environ.get(key, default)
    if value is None or not value.isdecimal():
        raise ConfigRefused(
            f"{key}={value}: the launcher gives each process its number, but this is none; start with "
            "`torchrun --nproc-per-node N train.py ...` or `srun python train.py ...`, or unset it for one process"
        )
    return value


def _slurm_meeting(environ: Mapping[str, str]) -> str:
    """tcp://HOST:PORT: the first host of the step, and a port that follows from the job and step."""
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise ConfigRefused("SLURM_STEP_NODELIST names no host: export MASTER_ADDR=the first host of the job")
    job, step = (int(_number(environ, key, "0")) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = environ.get("MASTER_PORT") or str(_PORTS[(job * 31 + step) % len(_PORTS)])
    return f"tcp://{host}:{port}"


def first_host(nodes: str) -> str:
    """First host of Slurm's compressed list: `gpu[007-012,020],login1` -> `gpu007`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes.strip())
    return "".join(part or "" for part in found.groups()) if found else ""
