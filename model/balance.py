"""How evenly experts are used: the routers' tallies of a step on all ranks, what follows from them, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.config import ModelConfig, MoEConfig
from model.router import Router

_WIDER = 5
"""Numbers behind the loads in a message: entropy, balance loss, z-loss, dropped pairs, and the spread of biases."""


class Balance:
    """The routers of this rank, among all layers of the model.

    The message of a step has a row for each sparse layer of the whole model, whichever rank has it: one shape for
    all. `holders` ranks have each layer; 1 for one process, which sends no message.
    """

    def __init__(self, config: ModelConfig, routers: Mapping[int, Router], world: int, holders: int) -> None:
        self.layers = [n for n in range(config.layers) if config.moe is not None and config.moe.is_sparse(n)]
        self.moe, self.routers, self.world, self.holders = config.moe, dict(routers), world, holders
        self.gathered: Tensor | None = None

    def clear(self) -> None:
        """Begin a step."""
        for router in self.routers.values():
            router.tally.zero_()

    @torch.no_grad()
    def gather(self) -> None:
        """Add up the tallies of a step over all ranks; every rank calls this."""
        if self.moe is None:
            return
        device = next((r.tally.device for r in self.routers.values()), None) or _message_device()
        total = torch.zeros(len(self.layers), self.moe.experts + _WIDER, dtype=torch.float64, device=device)
        for number, router in self.routers.items():
            row = total[self.layers.index(number)]
            row[:-1] = router.tally
            row[-1] = (router.balance.amax() - router.balance.amin()) / self.holders
        if self.world > 1:
            dist.all_reduce(total)
        self.gathered = total

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Move the routers' biases by the loads of the step, unless it was skipped (1.0)."""
        if self.moe is None or self.moe.balance != "bias" or self.gathered is None:
            return
        for number, router in self.routers.items():
            router.update_balance(self.gathered[self.layers.index(number)][:-_WIDER], skipped)

    def records(self, tokens: int) -> dict[int, dict[str, float]]:
        """What each sparse layer's router did in the step gathered last, over its `tokens`; by layer number."""
        rows = [] if self.gathered is None else self.gathered.tolist()
        return {number: _record(row, tokens) for number, row in zip(self.layers, rows, strict=False)}

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The biases by layout-free name; they are whole on every rank that has the layer."""
        for number, router in self.routers.items():
            yield f"model.layers.{number}.mlp.router.balance", router.balance


def losses(records: Mapping[int, Mapping[str, float]], moe: MoEConfig) -> dict[str, float]:
    """The losses that a step's routers added to its cross-entropy, by name."""
    named = {"balance": moe.balance_coefficient, "router_z": moe.z_loss}
    sums = {"balance": "balance_loss", "router_z": "z_loss"}
    return {name: sum(r[sums[name]] for r in records.values()) for name, on in named.items() if on}


_WHOLE: dict[str, Callable[[list[float]], float]] = {
    "load_min": min, "load_mean": fmean, "load_max": max, "max_vio": max, "entropy": fmean, "dropped": fmean,
    "balance_loss": sum, "z_loss": sum, "bias_spread": max,
}  # fmt: skip
"""From the layers' records to the model's."""


def summary(records: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """The `moe` record of a step: of the whole model, and in `layers` of each layer, by its number."""
    whole = {name: join([record[name] for record in records.values()]) for name, join in _WHOLE.items()}
    return {**whole, "layers": {str(number): dict(record) for number, record in records.items()}}


def _record(row: Sequence[float], tokens: int) -> dict[str, float]:
    """Loads in tokens an expert; max_vio is the largest over the mean, less 1 (DeepSeek-V3's measure)."""
    loads, (entropy, balance, z_loss, dropped, spread) = row[:-_WIDER], row[-_WIDER:]
    mean = fmean(loads)
    return {
        "load_min": min(loads), "load_mean": mean, "load_max": max(loads),
        "max_vio": max(loads) / mean - 1.0 if mean else 0.0, "entropy": entropy / max(1, tokens),
        "dropped": dropped / max(1.0, sum(loads)), "balance_loss": balance, "z_loss": z_loss, "bias_spread": spread,
    }  # fmt: skip


def _message_device() -> torch.device:
    """Where the default group's messages lie, for a rank without a sparse layer."""
    on_cuda = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
