"""Places in the shuffled order and sides of the split are hashes: even, and of the document alone."""

from __future__ import annotations

import numpy as np
import pytest

from data.preparing.shuffle import content_digest, held_out_limit, place_digest, ranks, sides, words

FIRST = words(content_digest(b"%d" % number) for number in range(4000))[:, 0]


@pytest.mark.parametrize("values", [ranks(FIRST, 0), ranks(FIRST, 1), sides(FIRST)])
def test_values_are_spread_evenly_and_none_comes_twice(values: np.ndarray) -> None:
    counts = np.histogram(values.astype(np.float64), bins=16, range=(0, 2.0**64))[0]
    assert abs(counts - 250).max() < 5 * 250**0.5
    assert len(set(values.tolist())) == 4000


def test_orders_of_two_seeds_and_the_split_have_nothing_to_do_with_each_other() -> None:
    kinds = [ranks(FIRST, 0), ranks(FIRST, 1), sides(FIRST), FIRST]
    places = np.array([np.argsort(np.argsort(kind)) for kind in kinds])
    correlations = np.corrcoef(places)[np.triu_indices(4, 1)]
    assert abs(correlations).max() < 5 / 4000**0.5


def test_a_share_is_held_out_and_at_least_the_lowest() -> None:
    values = sides(FIRST)
    assert (values <= np.uint64(held_out_limit(0.1, int(values.min())))).mean() == pytest.approx(0.1, abs=0.025)
    assert (values <= np.uint64(held_out_limit(1e-12, int(values.min())))).sum() == 1


def test_a_text_has_one_digest_and_its_copies_have_places_of_their_own() -> None:
    digest = content_digest(b"text")
    assert digest == content_digest(b"text") != content_digest(b"text ")
    assert len({place_digest(digest, key) for key in ("a:1", "a:2", "b:1", "\ud800")}) == 4
