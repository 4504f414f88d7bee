"""The keyed permutation and the place of a sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import Permutation, SampleOrder
from errors import DataRefused

sizes = st.integers(1, 3000)
keys = st.integers(0, 2**64 - 1)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@settings(deadline=None)
@given(sizes, keys)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, key).map(np.arange(size))), np.arange(size))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2**40), keys, st.data())
def test_one_index_and_an_array_of_them_go_to_the_same_places(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permutation = Permutation(size, key)
    mapped = permutation.map(np.array(indices, np.int64))
    assert mapped.tolist() == [permutation(index) for index in indices]
    assert mapped.min() >= 0 and mapped.max() < size


def test_a_huge_permutation_never_meets_itself() -> None:
    places = Permutation(2**40 - 12345, 7).map(np.arange(200_000))
    assert np.unique(places).size == 200_000


def test_the_key_chooses_the_permutation() -> None:
    indices = np.arange(1000)
    agreeing = (Permutation(1000, 1).map(indices) == Permutation(1000, 2).map(indices)).sum()
    assert agreeing < 10


def test_the_order_is_the_same_in_every_version() -> None:
    assert [Permutation(1000, 42)(index) for index in range(6)] == [984, 245, 270, 533, 66, 666]
    order = SampleOrder(10_000, 16, seed=3, source="web")
    assert [order.start(sample) for sample in (0, 1, 622, 623, 5000)] == [8746, 7914, 2730, 5210, 8209]


@pytest.mark.parametrize("size", [1000, 1024, 1025, 50_000])
def test_neighbours_are_torn_apart(size: int) -> None:
    steps = np.abs(np.diff(Permutation(size, 11).map(np.arange(size))))
    assert (steps == 1).sum() < 15  # two are expected of a random permutation
    assert steps.mean() == pytest.approx(size / 3, rel=0.1)


def test_any_part_of_an_epoch_is_spread_evenly_over_the_stream() -> None:
    size, bins = 100_000, 50
    places = Permutation(size, 5).map(np.arange(size // 10))
    assert chi_square(np.bincount(places * bins // size, minlength=bins)) < 85  # 99.9% point at 49 degrees


@pytest.mark.parametrize("size", [2, 3, 5, 8, 17])
def test_over_keys_every_element_of_a_small_set_is_first_equally_often(size: int) -> None:
    firsts = np.array([Permutation(size, key)(0) for key in range(3000)])
    assert chi_square(np.bincount(firsts, minlength=size)) < 40  # 99.9% point at 16 degrees: 39.3


def test_all_orders_of_three_elements_are_equally_frequent() -> None:
    orders = [tuple(Permutation(3, key).map(np.arange(3))) for key in range(3000)]
    assert chi_square(np.array([orders.count(order) for order in set(orders)])) < 20.5  # 99.9% at 5 degrees
    assert len(set(orders)) == 6


def test_an_index_outside_is_refused() -> None:
    permutation = Permutation(10, 0)
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            permutation(outside)
        with pytest.raises(IndexError):
            permutation.map(np.array([outside]))


streams = st.integers(1, 40).flatmap(  # (tokens, seq_len), at least one sample long
    lambda seq_len: st.tuples(st.integers(seq_len + 1, 1500), st.just(seq_len))
)


@settings(deadline=None)
@given(streams, st.integers(0, 2**31), st.integers(0, 3))
def test_every_epoch_reads_every_chunk_once_and_leaves_out_what_it_says(
    stream: tuple[int, int], seed: int, epoch: int
) -> None:
    tokens, seq_len = stream
    order = SampleOrder(tokens, seq_len, seed, "web")
    count = order.samples_per_epoch
    assert count == max(1, (tokens - seq_len) // seq_len)
    starts = sorted(order.start(epoch * count + place) for place in range(count))
    assert np.all(np.diff(starts) == seq_len)
    assert starts[0] >= 0 and starts[-1] + seq_len + 1 <= tokens
    touched = starts[-1] + seq_len + 1 - starts[0]
    assert order.uncovered == tokens - touched
    assert order.uncovered < 2 * seq_len


@settings(deadline=None)
@given(streams, st.integers(0, 2**31), st.integers(0, 10**6))
def test_a_start_depends_on_the_sample_number_alone(stream: tuple[int, int], seed: int, sample: int) -> None:
    fresh = SampleOrder(*stream, seed, "web").start(sample)
    used = SampleOrder(*stream, seed, "web")
    for other in (0, 10**6, sample + 1):
        used.start(other)
    assert used.start(sample) == fresh


def test_epochs_seeds_and_sources_differ_in_order_and_offset() -> None:
    def starts(seed: int, source: str, epoch: int) -> list[int]:
        order = SampleOrder(100_000, 64, seed, source)
        return [order.start(epoch * order.samples_per_epoch + place) for place in range(20)]

    variants = [starts(0, "web", 0), starts(0, "web", 1), starts(1, "web", 0), starts(0, "code", 0)]
    assert len({tuple(variant) for variant in variants}) == 4
    assert len({variant[0] % 64 for variant in variants}) > 1


def test_over_epochs_every_offset_occurs() -> None:
    order = SampleOrder(801, 8, 0, "web")
    offsets = {order.start(epoch * order.samples_per_epoch) % 8 for epoch in range(200)}
    assert offsets == set(range(8))


def test_without_shuffling_chunks_come_in_natural_order_every_epoch() -> None:
    order = SampleOrder(100, 8, 0, "web", shuffle=False)
    count = order.samples_per_epoch
    assert [order.start(n) for n in range(2 * count)] == 2 * [8 * n for n in range(count)]


def test_a_stream_of_one_sample_is_enough() -> None:
    order = SampleOrder(9, 8, 0, "web")
    assert order.samples_per_epoch == 1 and order.uncovered == 0
    assert [order.start(n) for n in range(3)] == [0, 0, 0]


def test_a_stream_shorter_than_one_sample_is_refused_with_the_largest_length_that_fits() -> None:
    with pytest.raises(DataRefused, match=r"'web' has 8 tokens.*train.seq_len=8 needs 9.*at most 7"):
        SampleOrder(8, 8, 0, "web")


def test_the_report_tells_samples_and_what_is_left_out() -> None:
    assert SampleOrder(1000, 64, 0, "web").report.startswith(
        "14 samples of 64 tokens an epoch, 103 tokens (10.30%) left over"
    )


@given(st.integers(1, 12), st.integers(20, 200), st.lists(st.integers(0, 200), max_size=30), st.booleans())
def test_many_starts_at_once_are_those_of_each(seq_len: int, tokens: int, samples: list[int], shuffle: bool) -> None:
    order = SampleOrder(tokens, seq_len, 3, "web", shuffle)
    assert order.starts(np.array(samples, np.int64)).tolist() == [order.start(sample) for sample in samples]
