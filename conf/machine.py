"""Rules that depend on the machine a run is started on: cores, CUDA, credentials."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

from conf.problem import Problem, show
from conf.schema import Config

_WANDB_SERVER = "https://api.wandb.ai"


def machine_problems(config: Config) -> list[Problem]:
    """What this machine lacks for the configuration."""
    return [*_threads(config), *_device(config), *_wandb(config)]


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(config: Config) -> Iterator[Problem]:
    threads, cores = config.train.threads, usable_cores()
    if threads is not None and threads > cores:
        rule = f"this process may use {cores} core{'s' if cores != 1 else ''}"
        yield Problem("train.threads", show(threads), rule, f"write train.threads={cores}, or leave it null")


def _device(config: Config) -> Iterator[Problem]:
    asked, processes = config.train.device, _processes_here()
    if asked == "cpu" or (asked == "auto" and processes == 1):
        return
    import torch  # only here: the import takes longer than all other checks together

    if torch.cuda.is_available():
        if processes > torch.cuda.device_count():
            count = torch.cuda.device_count()
            rule = f"each process needs a CUDA device of its own, but this host has {count} for {processes} processes"
            fix = f"start {count} a host: torchrun --nproc-per-node {count} train.py ..., or write train.device=cpu"
            yield Problem("train.device", asked, rule, fix)
    elif asked == "cuda":
        built = torch.version.cuda is not None
        rule = "no CUDA device is visible" if built else "this PyTorch is built without CUDA"
        fix = "write train.device=cpu or train.device=auto"
        yield Problem("train.device", "cuda", rule, fix + ("" if built else ", or install a CUDA build of PyTorch"))


def _processes_here() -> int:
    """Processes that torchrun started on this host; Slurm's may each see their own devices only, and count as one."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def _wandb(config: Config) -> Iterator[Problem]:
    if config.metrics.wandb == "online" and not has_wandb_login():
        rule = "sending needs a login: WANDB_API_KEY is not set, and netrc has no entry for the server"
        fix = "run `wandb login`, or export WANDB_API_KEY, or write metrics.wandb=offline"
        yield Problem("metrics.wandb", "online", rule, fix)


def has_wandb_login() -> bool:
    """Whether W&B would find credentials; they are looked for, never kept."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _WANDB_SERVER).hostname or ""
    named = os.environ.get("NETRC")
    places = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(_has_entry(place.expanduser(), host) for place in places)


def _has_entry(place: Path, host: str) -> bool:
    try:
        return host in netrc.netrc(place).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
