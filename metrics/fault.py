"""A fault in a step's numbers: where they first were not finite; and which of several ranks' faults came first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Literal

Passing = Literal["weights", "forward", "backward"]
_ORDER: tuple[Passing, ...] = ("weights", "forward", "backward")


@dataclass(frozen=True)
class Numbers:
    """What a tensor holds."""

    shape: tuple[int, ...]
    """Its shape."""
    least: float
    """Smallest finite value; 0 where there is none."""
    largest: float
    """Largest finite value; 0 where there is none."""
    nan: int
    """How many are NaN."""
    inf: int
    """How many are infinite."""

    @property
    def elements(self) -> int:
        """How many values there are."""
        return prod(self.shape)

    @property
    def bad(self) -> int:
        """How many are not finite."""
        return self.nan + self.inf

    @property
    def words(self) -> str:
        """In a line."""
        share = 100.0 * self.bad / max(1, self.elements)
        return f"{list(self.shape)}, {self.least:.4g} to {self.largest:.4g}, {share:.3g}% not finite"


@dataclass(frozen=True)
class Fault:
    """Where a step's numbers first were not finite."""

    rank: int
    """The process on which it began."""
    passing: Passing
    """weights: a weight was not finite before the step began."""
    module: str
    """Global name: in the forward pass the module whose output is not finite while its inputs and weights are, in the
    backward pass the one that gives such a gradient; that of the parameter's owner where a parameter is at fault."""
    parameter: str | None
    """Global name of the parameter that is not finite, or whose gradient alone is not."""
    layer: int
    """Number of the block; that of the last one and more for what comes behind, -1 for what comes before."""
    micro_batch: int | None
    """Number on that rank, from 0; None for a weight."""
    samples: tuple[int, int] | None
    """Global numbers of the micro-batch's first sample and of the one after its last."""
    numbers: Numbers
    """Of the tensor at fault."""
    sample: int | None = None
    """Global number of the sample that the first row at fault belongs to, where rows are tokens."""
    position: int | None = None
    """Place in that sample of the row's token, from 0."""
    statistics: dict[str, Numbers] = field(default_factory=dict)
    """Of the module's inputs, weights and outputs, by words."""
    ranks: tuple[int, ...] = ()
    """All ranks on which a fault began by itself, this one's included."""

    @property
    def values(self) -> str:
        """nan or inf: NaN where there is any."""
        return "nan" if self.numbers.nan else "inf"

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sorts faults by when they begin: by micro-batch, then by pass, then in the order of the layers there."""
        layer = -self.layer if self.passing == "backward" else self.layer
        return -1 if self.micro_batch is None else self.micro_batch, _ORDER.index(self.passing), layer, self.rank

    @property
    def words(self) -> str:
        """In a sentence."""
        what = f"{self.numbers.bad:,} of {self.numbers.elements:,} values are {self.values}"
        if self.passing == "weights":
            return f"the weight {self.parameter} on rank {self.rank} is not finite: {what}"
        of = self.module if self.parameter is None else f"the gradient of {self.parameter}"
        begin, stop = self.samples or (0, 0)
        span = f"sample {begin}" if stop == begin + 1 else f"samples {begin} to {stop - 1}"
        at = "" if self.sample is None else f", the first at token {self.position} of sample {self.sample}"
        return (
            f"it begins in the {self.passing} pass, in {of}, on rank {self.rank} in micro-batch {self.micro_batch} "
            f"({span}): {what}{at}"
        )


def to_json(fault: Fault | None) -> str:
    """One line; empty for none. Floats that are not finite do not occur in a fault."""
    return "" if fault is None else json.dumps(asdict(fault))


def from_json(text: str) -> Fault | None:
    """What `to_json` made."""
    return from_record(json.loads(text)) if text else None


def from_record(raw: dict[str, Any]) -> Fault:
    """A fault from what `dataclasses.asdict` made of it.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    given = dict(raw)
    given["numbers"] = _numbers(raw["numbers"])
    given["statistics"] = {name: _numbers(each) for name, each in raw["statistics"].items()}
    given["samples"] = None if raw["samples"] is None else tuple(raw["samples"])
    given["ranks"] = tuple(raw["ranks"])
    return Fault(**given)


def _numbers(raw: dict[str, Any]) -> Numbers:
    return Numbers(tuple(raw["shape"]), raw["least"], raw["largest"], raw["nan"], raw["inf"])


def earliest(texts: Iterable[str]) -> Fault | None:
    """The fault that came first, of all ranks' as JSON; None where no rank has one."""
    found: Sequence[Fault] = [each for each in map(from_json, texts) if each is not None]
    if not found:
        return None
    first = min(found, key=lambda each: each.order)
    return replace(first, ranks=tuple(sorted(each.rank for each in found)))
