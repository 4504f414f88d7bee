"""Proportions are exact in every prefix, whatever the sources."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.mixture import LONGEST, Mixture, period_counts, temperature_weights

some_counts = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(some_counts)
def test_every_prefix_is_within_one_of_exact_and_tijdemans_bound_holds(counts: list[int]) -> None:
    mixture, sources = Mixture(counts), range(len(counts))
    bound = 1 - Fraction(1, max(2, 2 * len(counts) - 2))
    seen = [0] * len(counts)
    for sample in range(mixture.period):
        assert mixture.before(sample) == seen
        source, place = mixture.place(sample)
        assert place == seen[source]
        seen[source] += 1
        exact = [Fraction(counts[each] * (sample + 1), mixture.period) for each in sources]
        assert max(abs(exact[each] - seen[each]) for each in sources) <= bound
    assert seen == counts


@settings(max_examples=100, deadline=None)
@given(some_counts, st.integers(0, 10**12))
def test_far_ahead_places_and_counts_agree(counts: list[int], sample: int) -> None:
    mixture = Mixture(counts)
    before = mixture.before(sample)
    source, place = mixture.place(sample)
    assert sum(before) == sample and before[source] == place
    before[source] += 1
    assert mixture.before(sample + 1) == before


@given(some_counts, st.lists(st.integers(0, 10**12), max_size=20))
def test_many_places_at_once_are_those_of_each(counts: list[int], samples: list[int]) -> None:
    mixture = Mixture(counts)
    sources, before = mixture.places(np.array(samples, np.int64))
    assert list(zip(sources.tolist(), before.tolist(), strict=True)) == [mixture.place(sample) for sample in samples]


def test_eight_sources_at_a_million_million_samples_are_within_one_of_their_weights() -> None:
    weights = [Fraction(each) for each in ("0.31", "0.23", "0.17", "0.11", "0.08", "0.06", "0.03", "0.01")]
    mixture = Mixture(period_counts(weights))
    for sample in (10**12, 10**12 + 1, 10**12 + 37, 10**12 + 99):
        for weight, count in zip(weights, mixture.before(sample), strict=True):
            assert abs(weight * sample - count) < 1


def test_weights_of_few_digits_have_a_short_period_and_are_exact() -> None:
    assert period_counts([Fraction("0.6"), Fraction("0.3"), Fraction("0.1")]) == [6, 3, 1]
    assert period_counts([Fraction(3), Fraction(1)]) == [3, 1]
    assert period_counts([Fraction(1, 3), Fraction(1, 3), Fraction(1, 3)]) == [1, 1, 1]


@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=9))
def test_other_weights_are_rounded_to_a_period_and_no_source_is_lost(weights: list[float]) -> None:
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    counts = period_counts([Fraction(weight) for weight in weights])
    assert min(counts) >= 1 and sum(counts) <= LONGEST
    for share, count in zip(shares, counts, strict=True):
        assert abs(share * sum(counts) - count) <= len(weights)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_temperature_weights_are_powers_of_sizes_normalised(temperature: float) -> None:
    sizes = [10, 1000, 70]
    wanted = [size ** (1 / temperature) for size in sizes]
    for weight, power in zip(temperature_weights(sizes, temperature), wanted, strict=True):
        assert float(weight) == pytest.approx(power / sum(wanted), rel=1e-12)


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1e300])
def test_no_temperature_is_too_much(temperature: float) -> None:
    assert sum(temperature_weights([10**12, 1, 7], temperature)) == 1


def test_a_source_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Mixture([3, 0])
