"""Every source is read in its own order, one sample after the other, whatever the mixtures and when they change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples import Phase, Samples, Source, going_on

NAMES = ("a", "b", "c")
LENGTHS = {"a": 100, "b": 170, "c": 410}
mixtures = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)
plans = st.lists(st.tuples(st.integers(1, 60), mixtures), min_size=1, max_size=4)


def sources() -> list[Source]:
    return [Source(name, named(name, length), 5) for name, length in LENGTHS.items()]


def named(name: str, tokens: int) -> Any:
    corpus = Mock()
    corpus.configure_mock(label=name, tokens=tokens)
    return corpus


def phases_of(plan: Sequence[tuple[int, dict[str, int]]]) -> list[Phase]:
    first, phases = 0, []
    for length, counts in plan:
        phases.append(Phase(first, counts, 8))
        first += length
    return phases


def read(samples: Samples, begin: int, end: int) -> list[tuple[str, int]]:
    return [(corpus.label, start) for corpus, start in samples.places(range(begin, end))]  # type: ignore[attr-defined]


@settings(max_examples=80, deadline=None)
@given(plans)
def test_each_source_goes_on_where_it_stood_through_all_phases(plan: list[tuple[int, dict[str, int]]]) -> None:
    samples, orders = Samples(sources(), phases_of(plan)), {source.name: source.order(8) for source in sources()}
    seen = dict.fromkeys(NAMES, 0)
    end = sum(length for length, _ in plan)
    for number, (name, start) in enumerate(read(samples, 0, end)):
        assert {each: samples.cursors(number).get(each, 0) for each in NAMES} == seen
        assert start == orders[name].start(seen[name])
        seen[name] += 1
    for name, epochs in samples.epochs(end).items():
        assert epochs == seen[name] / orders[name].samples_per_epoch


@settings(max_examples=80, deadline=None)
@given(plans, mixtures, st.integers(0, 250))
def test_a_changed_mixture_begins_a_phase_and_loses_no_place(
    plan: list[tuple[int, dict[str, int]]], other: dict[str, int], at: int
) -> None:
    history = phases_of(plan)
    before, after = Samples(sources(), history), Samples(sources(), going_on(history, [Phase(0, other, 8)], at))
    assert read(before, 0, at) == read(after, 0, at)
    stood, stands = before.cursors(at), after.cursors(at)
    assert all(stood.get(name, 0) == stands.get(name, 0) for name in NAMES)
    assert {name for name, _ in read(after, at, at + sum(other.values()))} == set(other)


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(0, 250))
def test_the_same_plan_goes_on_as_if_nothing_had_been(plan: list[tuple[int, dict[str, int]]], at: int) -> None:
    planned = phases_of(plan)
    history = [phase for phase in planned if phase.first <= at]
    again = Samples(sources(), going_on(history, planned, at))
    assert read(again, 0, 250) == read(Samples(sources(), planned), 0, 250)


def test_a_change_and_back_keeps_both_in_the_history() -> None:
    one, other = {"a": 1}, {"b": 1}
    first = going_on([], [Phase(0, one, 8)], 0)
    second = going_on(first, [Phase(0, other, 8)], 7)
    third = going_on(second, [Phase(0, one, 8)], 9)
    assert [(phase.first, phase.counts) for phase in third] == [(0, one), (7, other), (9, one)]
    assert [name for name, _ in read(Samples(sources(), third), 5, 11)] == ["a", "a", "b", "b", "a", "a"]


@pytest.mark.parametrize("firsts", [[], [1], [0, 5, 5], [0, 9, 3]])
def test_phases_that_do_not_ascend_are_refused(firsts: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Samples(sources(), [Phase(first, {"a": 1}, 8) for first in firsts])


def test_another_length_of_samples_begins_each_sources_next_epoch() -> None:
    """Chunks of two lengths overlap: nothing of a new epoch was read in it before."""
    phases = [Phase(0, {"a": 1, "b": 1}, 8), Phase(30, {"a": 1, "b": 1}, 16)]
    samples = Samples(sources(), phases)
    before, after = samples.cursors(29), samples.cursors(30)
    orders = {source.name: (source.order(8), source.order(16)) for source in sources()}
    for name in ("a", "b"):
        old, new = orders[name]
        epochs = -(-(before[name] + 1 if name == "b" else before[name]) // old.samples_per_epoch)
        assert after[name] == epochs * new.samples_per_epoch
    assert (samples.seq_len(29), samples.seq_len(30)) == (8, 16)
    place = samples.place(30)
    assert place[1] == orders["a"][1].start(after["a"])


def test_a_phase_is_the_same_after_json() -> None:
    phase = Phase(7, {"b": 2, "a": 1}, 16)
    assert Phase.of(json.loads(json.dumps(asdict(phase)))) == phase
    assert list(Phase.of(asdict(phase)).counts) == ["b", "a"]


def test_a_source_may_be_too_short_for_lengths_at_which_it_was_never_read() -> None:
    long, short = Source("long", named("long", 9000), 5), Source("short", named("short", 60), 5)
    phases = [Phase(0, {"long": 1}, 512), Phase(4, {"long": 1, "short": 1}, 32)]
    samples = Samples([long, short], phases)
    assert samples.epochs(3)["short"] == 0.0
    assert {corpus.label for corpus, _ in samples.places(range(4, 8))} == {"long", "short"}  # type: ignore[attr-defined]
