"""Where stages and layers go."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import ModelConfig
from model.parts import layers_of_stages, parts_of
from parallel.config import ParallelConfig
from parallel.schedules import SCHEDULES, schedule_name, split_layers, stages_of, stages_per_rank


def dearest(counts, embedding, head):
    costs = list(map(float, counts))
    costs[0] += embedding
    costs[-1] += head
    return max(costs)


def best(layers, stages, embedding, head):
    """By trying every split."""

    def splits(left, places):
        if places == 1:
            yield (left,)
            return
        for first in range(1, left - places + 2):
            yield from ((first, *rest) for rest in splits(left - first, places - 1))

    return min((dearest(counts, embedding, head) for counts in splits(layers, stages)), default=inf)


@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(data):
    stages = data.draw(st.integers(1, 5))
    layers = data.draw(st.integers(stages, 9))
    embedding, head = data.draw(st.floats(0, 2)), data.draw(st.floats(0, 5))
    counts = split_layers(layers, stages, embedding, head)
    assert sum(counts) == layers and min(counts) >= 1 and len(counts) == stages
    assert dearest(counts, embedding, head) == pytest.approx(best(layers, stages, embedding, head))


def test_more_stages_than_layers_cannot_be():
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        split_layers(2, 3, 0.1, 1.0)


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
