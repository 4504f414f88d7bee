"""Where stages and layers go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig
from model.parts import layers_of_stages, parts_of
from parallel.config import ParallelConfig
from parallel.schedules import SCHEDULES, schedule_name, split_layers, stages_of, stages_per_rank


def dearest(costs, counts, embedding, head):
    left, sums = list(costs), []
    for count in counts:
        sums.append(sum(left[:count]))
        left = left[count:]
    sums[0] += embedding
    sums[-1] += head
    return max(sums)


def splits(layers, stages):
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        yield from ((first, *rest) for rest in splits(layers - first, stages - 1))


@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(data):
    stages = data.draw(st.integers(1, 5))
    costs = data.draw(st.lists(st.floats(0.1, 9), min_size=stages, max_size=9))
    embedding, head = data.draw(st.floats(0, 2)), data.draw(st.floats(0, 5))
    counts = split_layers(costs, stages, embedding, head)
    assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == stages
    best = min(dearest(costs, each, embedding, head) for each in splits(len(costs), stages))
    assert dearest(costs, counts, embedding, head) == pytest.approx(best)


def test_the_other_stages_are_even():
    assert sorted(split_layers([1.0] * 11, 4, 0.0, 2.9)) == [1, 3, 3, 4]
    assert split_layers([1.0] * 10, 4, 0.0, 4.0) == [3, 3, 3, 1]
    assert split_layers([4.0, 1.0, 1.0, 1.0, 1.0], 2, 0.0, 0.0) == [1, 4]  # a dense layer, then cheaper ones


def test_more_stages_than_layers_cannot_be():
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        split_layers([1.0, 1.0], 3, 0.1, 1.0)


@pytest.mark.parametrize("v_shaped", [False, True])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_stage_is_on_one_rank(pp, v_shaped):
    held = [stages_of(rank, pp, 2, v_shaped) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(2 * pp))
    assert held[0] == ([0, 2 * pp - 1] if v_shaped else [0, pp])


def test_the_schedule_follows_from_vpp():
    assert schedule_name(ParallelConfig(pp=2)) == "1f1b"
    assert schedule_name(ParallelConfig(pp=2, vpp=2)) == "interleaved"
    assert [stages_per_rank(ParallelConfig(pp=2, schedule=s)) for s in SCHEDULES] == [1, 1, 2, 2, 2, 2]  # type: ignore[arg-type]
    assert stages_per_rank(ParallelConfig()) == 1


def test_parts_cover_the_model_once_and_the_head_counts():
    model = ModelConfig(layers=8, vocab_size=8192)
    parallel = ParallelConfig(pp=2, vpp=2)
    counts = layers_of_stages(model, parallel)
    assert counts[-1] < counts[0]
    parts = dict(part for rank in range(2) for part in parts_of(model, parallel, rank))
    assert [n for stage in range(4) for n in parts[stage].layers] == list(range(8))
    assert [parts[stage].first for stage in range(4)] == [True, False, False, False]
    assert [parts[stage].last for stage in range(4)] == [False, False, False, True]
    assert layers_of_stages(model, ParallelConfig(pp=2, layers_per_stage=(5, 3))) == [5, 3]
