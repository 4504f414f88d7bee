"""Phases come out of the configuration as it is written, wherever the run stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig, PhaseConfig, SourceConfig
from data.phases import planned_phases
from data.samples import Phase

SIZES = {"a": 1000, "b": 4000}


def config(
    *phases: PhaseConfig, weights: tuple[float | None, float | None] = (None, None), **others: float
) -> DataConfig:
    sources = tuple(SourceConfig(name, weight, prefix=name) for name, weight in zip(SIZES, weights, strict=True))
    return DataConfig(sources=sources, phases=phases, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "temperature", "counts"),
    [
        ((None, None), None, {"a": 1, "b": 1}), ((0.3, 0.7), None, {"a": 3, "b": 7}), ((3, 1), None, {"a": 3, "b": 1}),
        ((None, None), 1.0, {"a": 1, "b": 4}), ((0.0, 2.0), None, {"b": 1}),
    ],
)  # fmt: skip
def test_weights_become_counts_of_a_period(
    weights: tuple[float | None, float | None], temperature: float | None, counts: dict[str, int]
) -> None:
    settings = {} if temperature is None else {"temperature": temperature}
    assert planned_phases(config(weights=weights, **settings), SIZES, 16) == [Phase(0, counts, 16)]


def test_temperature_evens_sources_out() -> None:
    (phase,) = planned_phases(config(temperature=2.0), SIZES, 16)
    assert phase.counts["b"] / phase.counts["a"] == pytest.approx(2.0, rel=1e-3)  # (4000 / 1000)^(1/2)


THREE = (PhaseConfig(160, {"a": 1.0}), PhaseConfig(90, {"a": 0.5, "b": 0.5}), PhaseConfig(None, {"b": 1.0}))


def test_phases_begin_at_their_tokens() -> None:
    assert planned_phases(config(*THREE), SIZES, 16) == [
        Phase(0, {"a": 1}, 16), Phase(10, {"a": 1, "b": 1}, 16), Phase(15, {"b": 1}, 16)
    ]  # fmt: skip


@given(st.integers(0, 40))
def test_a_plan_is_the_same_wherever_the_run_stands(sample: int) -> None:
    assert planned_phases(config(*THREE), SIZES, 16, sample, 16 * sample) == planned_phases(config(*THREE), SIZES, 16)


def test_with_longer_samples_a_phase_still_begins_at_its_tokens() -> None:
    """80 tokens in samples of 8 are read; the second phase begins 80 tokens on, 5 samples of 16."""
    plan = planned_phases(config(*THREE), SIZES, 16, sample=10, tokens=80)
    assert [phase.first for phase in plan] == [0, 15, 20]


def test_a_phase_without_weights_has_those_of_the_sources() -> None:
    plan = planned_phases(config(PhaseConfig(160, {"b": 1.0}), PhaseConfig(), weights=(0.25, 0.75)), SIZES, 16)
    assert plan == [Phase(0, {"b": 1}, 16), Phase(10, {"a": 1, "b": 3}, 16)]
