"""A sweep as Hydra's basic sweeper understands it: the cartesian product of the values of each override."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.groups import Groups
from conf.overrides import parse
from conf.problem import Problem

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MOST_JOBS = 1000
"""Combinations of one sweep; more are refused as a slip of the finger."""


@dataclass(frozen=True)
class Combination:
    """One job of a sweep."""

    overrides: tuple[str, ...]
    """All its overrides."""
    label: str
    """The swept ones, in short."""


def expand(overrides: Sequence[str], groups: Groups) -> tuple[list[Combination], list[Problem]]:
    """Every combination, the last override varying fastest; what cannot be parsed passes unchanged."""
    problems: list[Problem] = []
    axes = [_values(text, groups, problems) for text in overrides]
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_JOBS:
        rule = f"{count} combinations are more than the {MOST_JOBS} that one sweep may have"
        problems.append(Problem("--multirun", None, rule, "sweep over fewer values"))
    if problems:
        return [], problems
    swept = [len(axis) > 1 for axis in axes]
    return [
        Combination(chosen, " ".join(text for text, varies in zip(chosen, swept, strict=True) if varies))
        for chosen in itertools.product(*axes)
    ], []


def _values(text: str, groups: Groups, problems: list[Problem]) -> list[str]:
    """The single-valued overrides that one override stands for."""
    from hydra.errors import HydraException

    try:
        override = parse(text)
    except HydraException:
        return [text]
    if not override.is_sweep_override():
        return [text]
    try:
        values = list(itertools.islice(_enumerated(override, groups), MOST_JOBS + 1))
    except (HydraException, ValueError) as error:
        problems.append(Problem(text, None, f"cannot be swept: {error}", "write the values: key=1,2,3"))
        return [text]
    if not values:
        problems.append(Problem(text, None, "names no value", "write the values: key=1,2,3"))
    return [f"{override.get_key_element()}={value}" for value in values] or [text]


def _enumerated(override: Override, groups: Groups) -> Iterator[str]:
    from hydra.core.override_parser.types import Glob

    if not override.is_discrete_sweep():
        raise ValueError("an interval has no list of values")
    value = override.value()
    if isinstance(value, Glob):
        yield from value.filter(list(groups.choices.get(override.key_or_group, ())))
        return
    yield from override.sweep_string_iterator()
