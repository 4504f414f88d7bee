"""Joining the run's process group, leaving it, and small agreements between its processes."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from errors import ConfigRefused, PeerLost
from parallel.ranks import Ranks

# What NCCL's flight recorder keeps of each rank's last collectives, so that a hang has an address.
_FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


_LOSS = re.compile(
    r"(closed|reset) by peer|connection refused|broken pipe|socket (closed|timeout)|timed out|wait timeout|"
    r"failed to (recv|send|connect)|connectFullMesh",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Everyone:
    """All processes of the run; with one process nothing is sent."""

    rank: int = 0
    """This process."""
    world: int = 1
    """Number of processes."""
    group: dist.ProcessGroup | None = None
    """Whose messages these are; None: the default group's."""

    def apart(self, timeout: int) -> Everyone:
        """The same processes with messages of their own, for a second thread; every process must ask.

        timeout: seconds after which waiting for another process fails.
        """
        if self.world == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        return replace(self, group=group)

    def add(self, numbers: Sequence[int]) -> list[int]:
        """Sums over all processes."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(list(numbers), dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return [int(n) for n in total]

    def gather(self, text: str) -> list[str]:
        """Every process's text, in the order of ranks."""
        if self.world == 1:
            return [text]
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(own)
        dist.all_reduce(sizes, group=self.group)
        widest = int(sizes.max())
        padded = torch.zeros(widest, dtype=torch.uint8)
        padded[: len(own)] = own
        every = torch.zeros(self.world * widest, dtype=torch.uint8)
        if widest:
            dist.all_gather_single(every, padded, group=self.group)
        return [
            row[:size].numpy().tobytes().decode()
            for row, size in zip(every.view(self.world, widest), sizes.tolist(), strict=True)
        ]

    def require_same(self, what: str, text: str) -> None:
        """Refuse to go on where processes differ in something that must be one.

        Raises:
            ConfigRefused: naming the first process that differs, on every process.
        """
        texts = self.gather(text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise ConfigRefused(
                    f"the processes differ in {what}: rank 0 has {texts[0]}, rank {rank} has {other}; start all with "
                    "one command, one version of the code, and folders that every host sees"
                )

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier(group=self.group)


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed because of another process; gloo says so in words, pipelines wrap its error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or _LOSS.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def meeting(ranks: Ranks, limit: datetime.timedelta) -> Store:
    """Where the processes tell each other their addresses. torchrun keeps one store over its restarts, in which those
    of the processes before would be met: each start has its own part of it."""
    store = next(rendezvous(ranks.rendezvous, ranks.rank, ranks.world, timeout=limit))[0]
    store.set_timeout(limit)
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}_of_{ranks.world}", store)


@contextmanager
def joined(ranks: Ranks, device: torch.device, timeout: int) -> Iterator[Everyone]:
    """Inside, the process group exists (unless there is one process alone).

    Args:
        device: what this process computes on: gloo serves a CPU, NCCL a GPU (with gloo for small messages).
        timeout: seconds after which waiting for another process fails.
    """
    if ranks.world == 1:
        yield Everyone()
        return
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        for key, value in _FLIGHT_RECORDER.items():
            os.environ.setdefault(key, value)
    clean = False
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=meeting(ranks, limit), rank=ranks.rank, world_size=ranks.world, timeout=limit
        )
        yield Everyone(ranks.rank, ranks.world)
        clean = True
    except RuntimeError as error:
        if not is_loss(error):
            raise
        first = str(error).splitlines()[0][:200]
        raise PeerLost(
            f"rank {ranks.rank} lost another process, or met none within parallel.timeout={timeout} s ({first}); "
            "the first message above, or the newest of the run's logs/rank_*.txt, says why"
        ) from error
    finally:
        # NCCL's end is itself a collective: after a failure it would wait for processes that wait for this one.
        if dist.is_initialized() and (clean or backend == "gloo"):
            dist.destroy_process_group()
