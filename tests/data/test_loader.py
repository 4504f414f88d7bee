"""Training steps and validation micro-batches against a slow plain reading of the same documents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import RampConfig, StepRange
from data.corpus.indexed import IndexedCorpus
from data.loader import IGNORE, MicroBatch, StepBatch, TrainLoader, validation_batches
from data.order import SampleOrder
from data.ramp import PlannedStep, Ramp
from data.samples import Phase, Samples, Source, samples_of
from errors import DataRefused

MakeCorpus = Callable[[Sequence[Sequence[int]]], IndexedCorpus]
VOCAB = 1000
FIELDS = ("tokens", "labels", "positions")
DOCUMENTS = [[document * 10 + token for token in range(1 + document % 7)] for document in range(90)]

ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
documents_of_ids = st.lists(ids, min_size=2, max_size=20)


def loader(corpus: IndexedCorpus, seq_len: int = 8, seed: int = 0, **options: Any) -> TrainLoader:
    usual = {"sizes": (4,), "micro_batch": 2, "document_mask": True, "vocab_size": VOCAB, "prefetch": 2}
    return TrainLoader(samples_of(Source("web", corpus, seed), seq_len), **{**usual, **options})


def planned(first: int, last: int, size: int = 4) -> Iterator[PlannedStep]:
    return Ramp(size).plan(first, 0, (last - first) // size)


def plain(documents: Sequence[Sequence[int]], starts: Sequence[int], seq_len: int, mask: bool) -> dict[str, list[int]]:
    """Tokens, labels, positions and cu_seqlens, token by token."""
    stream = [(number, token) for number, document in enumerate(documents) for token in document]
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    cuts: list[int] = []
    for start in starts:
        for at in range(start, start + seq_len):
            if at == start or (mask and stream[at][0] != stream[at - 1][0]):
                cuts.append(len(tokens))
            tokens.append(stream[at][1])
            positions.append(len(tokens) - 1 - cuts[-1])
            crosses = mask and stream[at + 1][0] != stream[at][0]
            labels.append(IGNORE if crosses else stream[at + 1][1])
    return {"tokens": tokens, "labels": labels, "positions": positions, "cu_seqlens": [*cuts, len(tokens)]}


def joined(steps: Sequence[StepBatch], field: str) -> list[int]:
    batches = [batch for step in steps for batch in step.micro_batches]
    return [value for batch in batches for value in getattr(batch, field).tolist()]


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


@settings(deadline=None, max_examples=60)
@given(documents_of_ids, st.integers(1, 12), st.booleans(), st.integers(0, 100))
def test_a_step_is_what_a_plain_reading_gives(
    make_corpus: MakeCorpus, documents: list[list[int]], seq_len: int, mask: bool, first: int
) -> None:
    seq_len = min(seq_len, sum(map(len, documents)) - 1)
    corpus = make_corpus(documents)
    order = SampleOrder(corpus.tokens, seq_len, 0, "web")
    with loader(corpus, seq_len, document_mask=mask, prefetch=0) as train:
        (step,) = train.steps(planned(first, first + 4))
    halves = (range(first, first + 2), range(first + 2, first + 4))
    for batch, samples in zip(step.micro_batches, halves, strict=True):
        expected = plain(documents, [order.start(sample) for sample in samples], seq_len, mask)
        assert {field: getattr(batch, field).tolist() for field in expected} == expected
        assert batch.samples == samples
    assert step.tokens == 4 * seq_len
    assert step.valid_tokens == sum(label != IGNORE for label in joined([step], "labels"))
    assert step.samples == range(first, first + 4)


def test_tensors_have_the_promised_types(make_corpus: MakeCorpus) -> None:
    with loader(make_corpus(DOCUMENTS)) as train:
        batch = next(train.steps(planned(0, 4))).micro_batches[0]
    assert [getattr(batch, field).dtype for field in FIELDS] == [torch.int64] * 3
    assert [getattr(batch, field).shape for field in FIELDS] == [(16,)] * 3
    assert batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("mask", [True, False])
def test_the_micro_batch_size_changes_nothing_but_the_cut(make_corpus: MakeCorpus, mask: bool) -> None:
    corpus = make_corpus(DOCUMENTS)
    steps = {}
    for size in (1, 2, 3, 6):
        with loader(corpus, sizes=(6,), micro_batch=size, document_mask=mask) as train:
            steps[size] = list(train.steps(planned(0, 60, 6)))
    for size in (2, 3, 6):
        assert all(joined(steps[size], field) == joined(steps[1], field) for field in FIELDS)
        for step, single in zip(steps[size], steps[1], strict=True):
            assert len(step.micro_batches) == 6 // size
            assert step.valid_tokens == single.valid_tokens


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 29), st.integers(0, 2**31), st.integers(0, 3))
def test_resuming_anywhere_gives_the_same_tail(make_corpus: MakeCorpus, done: int, seed: int, prefetch: int) -> None:
    corpus = make_corpus(DOCUMENTS)
    with loader(corpus, seed=seed) as whole, loader(corpus, seed=seed, prefetch=prefetch) as resumed:
        expected = list(whole.steps(planned(0, 120)))[done:]
        tail = list(resumed.steps(planned(4 * done, 120)))
    assert [step.samples for step in tail] == [step.samples for step in expected]
    assert all(joined(tail, field) == joined(expected, field) for field in FIELDS)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(0, 5))
def test_an_epoch_predicts_every_token_once_except_what_is_left_out(
    make_corpus: MakeCorpus, seed: int, epoch: int
) -> None:
    corpus = make_corpus([list(range(VOCAB))])  # a token is its own position
    order = SampleOrder(corpus.tokens, 8, seed, "web")
    count = order.samples_per_epoch
    with loader(corpus, seed=seed, sizes=(1,), micro_batch=1, prefetch=0) as train:
        targets = joined(list(train.steps(planned(epoch * count, (epoch + 1) * count, 1))), "labels")
    assert len(targets) == len(set(targets)) == VOCAB - order.uncovered - 1


def test_a_border_is_known_by_position_not_by_a_tokens_value(make_corpus: MakeCorpus) -> None:
    eod = 1
    corpus = make_corpus([[5, eod, 6, 7], [8, 9, 2, 3], [4, 4]])  # an eod inside a document, none at its end
    (batch,) = validation(corpus, micro_batch=1, samples=1)
    assert batch.labels.tolist() == [eod, 6, 7, IGNORE, 9, 2, 3, IGNORE]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_without_the_document_mask_documents_flow_into_each_other(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([[5, 6, 7], [8, 9, 2], [3, 4, 4, 4, 4, 4, 4]])
    (batch,) = validation(corpus, micro_batch=2, samples=2, seq_len=4, document_mask=False)
    assert batch.labels.tolist() == [6, 7, 8, 9, 2, 3, 4, 4]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_id_outside_the_vocabulary_is_refused_with_its_position(make_corpus: MakeCorpus, prefetch: int) -> None:
    ids = [3] * 400
    ids[222] = VOCAB
    with (
        loader(make_corpus([ids]), prefetch=prefetch) as train,
        pytest.raises(DataRefused, match=f"position 222 is {VOCAB}.*0 to {VOCAB - 1}"),
    ):
        list(train.steps(planned(0, 48)))


def test_an_id_that_is_only_a_target_is_checked_too(make_corpus: MakeCorpus) -> None:
    with pytest.raises(DataRefused, match=f"position 4 is {VOCAB}"):
        validation(make_corpus([[1, 2, 3, 4, VOCAB]]), micro_batch=1, samples=1, seq_len=4)


def test_what_goes_wrong_in_the_thread_is_raised_to_the_consumer_as_it_is(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OddError(Exception):
        pass

    corpus = make_corpus(DOCUMENTS)
    train = loader(corpus)
    steps = train.steps(planned(0, 40))
    first = next(steps)

    def fail(start: int, stop: int) -> None:
        raise OddError

    monkeypatch.setattr(corpus, "read", fail)
    assert first.samples == range(4)
    with pytest.raises(OddError):
        list(steps)
    assert not data_threads()


def test_a_consumer_that_stops_early_leaves_no_thread(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus(DOCUMENTS)
    with loader(corpus) as train:
        steps = train.steps(planned(0, 4000))
        next(steps)
        assert data_threads()
    assert not data_threads()
    steps = train.steps(planned(0, 4000))
    next(steps)
    assert data_threads()
    del steps
    assert not data_threads()


def test_a_closed_loader_ends_its_iteration_and_can_start_again(make_corpus: MakeCorpus) -> None:
    with loader(make_corpus(DOCUMENTS)) as train:
        steps = train.steps(planned(0, 4000))
        next(steps)
        train.close()
        assert list(steps) == []
        assert [step.samples for step in train.steps(planned(8, 16))] == [range(8, 12), range(12, 16)]


def test_waiting_is_measured_and_taken_once(make_corpus: MakeCorpus) -> None:
    with loader(make_corpus(DOCUMENTS), prefetch=0) as train:
        assert train.take_wait() == 0
        waits = [train.wait_seconds for _ in train.steps(planned(0, 40))]
        assert waits[0] > 0
        assert all(later > earlier for earlier, later in itertools.pairwise(waits))
        assert train.take_wait() >= waits[-1]
        assert train.take_wait() == 0


def test_for_a_gpu_every_tensor_is_pinned_by_the_thread_that_makes_it(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, str] = {}

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned[copy.data_ptr()] = threading.current_thread().name
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with loader(make_corpus(DOCUMENTS), pin=True) as source:
        found = list(source.steps(planned(0, 8)))
    with loader(make_corpus(DOCUMENTS)) as source:
        plain_steps = list(source.steps(planned(0, 8)))
    for field in (*FIELDS, "cu_seqlens"):
        assert joined(found, field) == joined(plain_steps, field)
        for batch in (batch for step in found for batch in step.micro_batches):
            assert pinned[getattr(batch, field).data_ptr()] == "data-prefetch"


@pytest.mark.parametrize("options", [{"micro_batch": 3}, {"micro_batch": 0}, {"prefetch": -1}])
def test_sizes_that_do_not_fit_are_refused(make_corpus: MakeCorpus, options: dict[str, int]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(DataRefused, match=f"{name}={value}"):
        loader(make_corpus(DOCUMENTS), **options)


PORTIONS = st.lists(st.builds(RampConfig, st.integers(1, 400), st.sampled_from([4, 8, 16])), max_size=2)
counts_of = st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(counts_of, min_size=1, max_size=3),
    PORTIONS,
    st.sampled_from([(1, 1), (1, 4), (2, 2), (4, 1), (1, 2), (2, 1)]),
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(0, 3),
)
def test_a_global_batch_holds_the_same_samples_on_any_ranks_through_ramps_phases_and_kills(
    make_corpus: MakeCorpus, mixtures: list[dict[str, int]], portions: list[RampConfig], cut: tuple[int, int],
    kills: list[int], prefetch: int,
) -> None:  # fmt: skip
    """A run is started again after each of `kills` steps, its ranks and micro-batch fixed by `cut`."""
    ranks, micro_batch = cut
    corpora = {name: make_corpus([[at * 3 + ord(name) for at in range(200)]] * 2) for name in "abc"}
    phases = [Phase(number * 37, counts, 8) for number, counts in enumerate(mixtures)]
    samples, ramp = Samples([Source(name, each, 1) for name, each in corpora.items()], phases), Ramp(8, portions, 8)
    seen: list[list[tuple[int, ...]]] = []
    for begin, end in itertools.pairwise([0, *itertools.accumulate([*kills, 4])]):
        parts = []
        for rank in range(ranks):
            with TrainLoader(
                samples, sizes=ramp.sizes, micro_batch=micro_batch, document_mask=True, vocab_size=VOCAB,
                prefetch=prefetch, rank=rank, ranks=ranks,
            ) as source:  # fmt: skip
                parts.append(list(source.steps(ramp.plan(ramp.after(0, begin), begin, end))))
        for steps in zip(*parts, strict=True):
            batches = [batch for step in steps for batch in step.micro_batches]
            seen.append(sorted(tuple(row) for batch in batches for row in batch.tokens.view(-1, 8).tolist()))
            assert sorted(n for batch in batches for n in batch.samples) == list(steps[0].samples)
    for number, planned in enumerate(ramp.plan(0, 0, len(seen))):
        places = [samples.place(sample) for sample in planned.samples]
        assert seen[number] == sorted(tuple(corpus.read(start, start + 8).tolist()) for corpus, start in places)


def test_a_step_that_is_passed_over_is_not_read(make_corpus: MakeCorpus) -> None:
    plan = Ramp(4).plan(8, 2, 6, [StepRange(4, 5)])
    with loader(make_corpus(DOCUMENTS)) as train:
        steps = list(train.steps(plan))
    assert [(step.samples.start, len(step.micro_batches), step.passed_over) for step in steps] == [
        (8, 2, False), (12, 0, True), (16, 0, True), (20, 2, False)
    ]  # fmt: skip


def validation(
    corpus: IndexedCorpus, micro_batch: int, samples: int, seq_len: int = 8, document_mask: bool = True
) -> list[MicroBatch]:
    groups = validation_batches(
        corpus,
        seq_len=seq_len,
        micro_batch=micro_batch,
        samples=samples,
        document_mask=document_mask,
        vocab_size=VOCAB,
    )
    return [batch for group in groups for batch in group]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 7, 16])
def test_validation_predicts_the_same_tokens_whatever_the_micro_batch(
    make_corpus: MakeCorpus, micro_batch: int
) -> None:
    corpus = make_corpus(DOCUMENTS)
    expected = plain(DOCUMENTS, [8 * sample for sample in range(10)], 8, mask=True)["labels"]
    batches = validation(corpus, micro_batch, samples=10)
    assert {batch.tokens.shape for batch in batches} == {(8 * micro_batch,)}
    labels = [label for batch in batches for label in batch.labels.tolist()]
    assert labels[:80] == expected
    assert set(labels[80:]) <= {IGNORE}
    assert [sample for batch in batches for sample in batch.samples] == list(range(10))


def test_validation_takes_all_chunks_when_fewer_are_there(make_corpus: MakeCorpus) -> None:
    batches = validation(make_corpus([list(range(50))]), micro_batch=4, samples=10**9)
    assert [batch.samples for batch in batches] == [range(4), range(4, 6)]
    assert batches[1].tokens.tolist() == [*range(32, 40), *list(range(40, 48)) * 3]
