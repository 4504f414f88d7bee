"""Which source serves sample n of a mixture, and its how manieth sample that is: arithmetic and a table of one period.

weights 0.6 0.3 0.1    period of 10    a b a a b a c a b a  | the same again ...
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

LONGEST = 1 << 16
"""Most samples of a period: weights are multiples of 1 / period."""

Counts = npt.NDArray[np.int64]


class Mixture:
    """Sources in exact proportions in every prefix of the samples.

    Of the first n samples source i has within 1 - 1 / (2 k - 2) of n w_i, for all n and any number k of sources, by
    the order of Tijdeman (The chairman assignment problem, 1980): of the sources that are behind enough, the one whose
    next sample is due first. After a period all counts are exact, so that a table of one serves any n.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        """counts: samples of each source in a period, each at least 1 (`period_counts`)."""
        if not counts or min(counts) < 1:
            raise ValueError(f"a mixture of {list(counts)} samples a period: each source needs at least one")
        self.counts = tuple(counts)
        self.period = sum(counts)
        self._order = _tijdeman(np.array(counts, np.int64))
        self._rank = _ranks(self._order, len(counts))

    def place(self, sample: int) -> tuple[int, int]:
        """Source of a sample, and how many of the source's samples come before it."""
        periods, at = divmod(sample, self.period)
        source = int(self._order[at])
        return source, periods * self.counts[source] + int(self._rank[at])

    def places(self, samples: Counts) -> tuple[Counts, Counts]:
        """`place` of many samples at once, [n] -> sources [n] and how many of a source's come before [n]."""
        periods, at = np.divmod(samples, self.period)
        sources = self._order[at].astype(np.int64)
        return sources, periods * np.array(self.counts)[sources] + self._rank[at]

    def before(self, sample: int) -> list[int]:
        """Samples of each source among the first `sample`."""
        periods, at = divmod(sample, self.period)
        return [
            periods * count + int(np.searchsorted(places, at))
            for count, places in zip(self.counts, self._places, strict=True)
        ]

    @cached_property
    def _places(self) -> list[Counts]:
        """Of each source, its places in a period, ascending."""
        return [np.flatnonzero(self._order == source) for source in range(len(self.counts))]


def period_counts(weights: Sequence[Fraction]) -> list[int]:
    """Samples of each source in the shortest period of at most LONGEST that has the weights exactly, else in one of
    LONGEST by largest remainders, each source at least one.

    weights: above 0; they need not add up to 1.
    """
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    period = int(np.lcm.reduce([share.denominator for share in shares], dtype=object))
    if period <= LONGEST:
        return [int(share * period) for share in shares]
    counts = [max(1, int(share * LONGEST)) for share in shares]
    while (missing := LONGEST - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        behind = [step * (share * LONGEST - count) for share, count in zip(shares, counts, strict=True)]
        able = [each for each in range(len(counts)) if counts[each] + step >= 1]
        counts[max(able, key=behind.__getitem__)] += step
    return counts


def temperature_weights(sizes: Sequence[int], temperature: float) -> list[Fraction]:
    """size^(1/T), normalised: T = 1 is in proportion to size, larger ones even sources out (Devlin, 2018)."""
    # Of the largest: powers of large sizes overflow, those of shares can only vanish.
    powers = [(size / max(sizes)) ** (1.0 / temperature) for size in sizes]
    return [Fraction(power) / Fraction(sum(powers)) for power in powers]


def _tijdeman(counts: Counts) -> npt.NDArray[np.uint16]:
    """Source of each place in a period, [sum of counts]; all in integers, times 2 k - 2."""
    period, margin = int(counts.sum()), max(1, 2 * len(counts) - 2)
    order = np.zeros(period, np.uint16)
    if len(counts) == 1:
        return order
    given = np.zeros_like(counts)
    due = _due(given, counts, period, margin)
    never = np.iinfo(np.int64).max
    for place in range(period):
        behind = margin * (counts * (place + 1) - given * period)  # of weight * (place + 1) - given, times both
        source = int(np.where(behind >= period, due, never).argmin())
        order[place] = source
        given[source] += 1
        due[source] = _due(given[source], counts[source], period, margin)
    return order


def _due(given: Counts, counts: Counts, period: int, margin: int) -> Counts:
    """First number of samples at which a source's next one must be among them."""
    late: Counts = -((-period * (margin * (given + 1) - 1)) // (margin * counts))
    return late


def _ranks(order: npt.NDArray[np.uint16], sources: int) -> Counts:
    """Of each place, how many places before it have the same source."""
    ranks = np.empty(len(order), np.int64)
    for source in range(sources):
        own = np.flatnonzero(order == source)
        ranks[own] = np.arange(len(own))
    return ranks
