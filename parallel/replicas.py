"""Whether ranks that hold the same elements hold the same bits: silent corruption shows there first."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from parallel.process import Everyone
from parallel.shards import Shard

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
Held = tuple[str, Tensor, Shard]
"""A tensor's global name, this rank's rectangle, and its place."""


@dataclass(frozen=True)
class Difference:
    """A tensor of which ranks hold different values."""

    name: str
    """Its global name."""
    ranks: tuple[int, ...]
    """Those whose values are in the minority; all of them where there is none."""

    @property
    def words(self) -> str:
        """In a sentence."""
        return f"{self.name} on rank {', '.join(map(str, self.ranks))}"


def check_replicas(tensors: Iterable[Held], everyone: Everyone) -> list[Difference]:
    """Tensors that ranks hold of one another and that differ in any bit, the same on all ranks; every rank must ask.

    Each rank hashes on its device and sends a few numbers: tensors that the same ranks hold are told together, and one
    by one only where they differ.
    """
    if everyone.world == 1:
        return []
    hashes = _hashes([each for each in tensors if each[1].numel() and each[2].copies > 1])
    together = {key: _digest(its) for key, its in hashes.items()}
    texts = [json.loads(each) for each in everyone.gather(json.dumps(together))]
    bad = {key for text in texts for key in text if len({each[key] for each in texts if key in each}) > 1}
    if not bad:
        return []
    own = {f"{key} {name}": value for key in sorted(bad & hashes.keys()) for name, value in hashes[key].items()}
    return list(_differences([json.loads(each) for each in everyone.gather(json.dumps(own))]))


def _hashes(tensors: list[Held]) -> dict[str, dict[str, str]]:
    """Of each set of tensors that the same ranks hold, by what says so, the tensors' hashes by name."""
    if not tensors:
        return {}
    found = torch.stack([_hash(tensor) for _, tensor, _ in tensors]).tolist()
    sets: dict[tuple[object, ...], dict[str, str]] = defaultdict(dict)
    for (name, _, shard), value in zip(tensors, found, strict=True):
        sets[shard.copies, shard.partial, ".experts." in name][f"{name} at {list(shard.start)}"] = f"{value:x}"
    return {_digest(dict.fromkeys(its, "")): its for its in sets.values()}


def _hash(tensor: Tensor) -> Tensor:
    """[] int64 on the device: all its bits, such that any one that flips changes it."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return torch.hash_tensor(bits).view(torch.int64)


def _digest(names: dict[str, str]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(names, sort_keys=True).encode())


def _differences(texts: list[dict[str, str]]) -> Iterator[Difference]:
    """texts: of each rank, hashes by key and name."""
    for key in sorted({key for text in texts for key in text}):
        values = {rank: text[key] for rank, text in enumerate(texts) if key in text}
        (most, count), *others = Counter(values.values()).most_common()
        if others:
            tied = others[0][1] == count
            ranks = tuple(rank for rank, value in values.items() if tied or value != most)
            yield Difference(key.partition(" ")[2].partition(" at ")[0], ranks)
