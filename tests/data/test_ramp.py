"""The arithmetic of growing batches against taking one step after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from data.config import RampConfig, StepRange
from data.ramp import Ramp

portions = st.lists(st.builds(RampConfig, st.integers(1, 300), st.integers(1, 9)), max_size=4)
ramps = st.builds(Ramp, st.integers(1, 20), portions, st.integers(1, 16))


def stepwise(ramp: Ramp, sample: int, steps: int) -> list[range]:
    found = []
    for _ in range(steps):
        found.append(range(sample, sample + ramp.size(sample)))
        sample = found[-1].stop
    return found


@given(ramps, st.integers(0, 200), st.integers(0, 60))
def test_after_some_steps_a_run_is_where_it_gets_one_by_one(ramp: Ramp, sample: int, steps: int) -> None:
    taken = stepwise(ramp, sample, steps)
    assert ramp.after(sample, steps) == (taken[-1].stop if taken else sample)


@given(ramps, st.integers(0, 400))
def test_as_many_steps_fit_as_can_be_taken(ramp: Ramp, samples: int) -> None:
    steps = ramp.steps_within(samples)
    assert ramp.after(0, steps) <= samples < ramp.after(0, steps + 1)


@given(ramps, st.integers(0, 30), st.integers(0, 30))
def test_a_plan_resumed_anywhere_goes_on_as_planned(ramp: Ramp, done: int, more: int) -> None:
    whole = list(ramp.plan(0, 0, done + more))
    resumed = list(ramp.plan(ramp.after(0, done), done, done + more))
    assert whole[done:] == resumed
    assert [step.samples for step in whole] == stepwise(ramp, 0, done + more)
    assert {len(step.samples) for step in whole} <= set(ramp.sizes)


def test_a_portion_lasts_its_tokens_rounded_up_to_steps() -> None:
    ramp = Ramp(8, [RampConfig(tokens=100, global_batch=2), RampConfig(tokens=64, global_batch=4)], seq_len=16)
    assert [len(step.samples) for step in ramp.plan(0, 0, 7)] == [2, 2, 2, 2, 4, 8, 8]
    assert ramp.sizes == (2, 4, 8)


def test_steps_are_passed_over_by_their_numbers() -> None:
    skips = [StepRange(3), StepRange(5, 6)]
    plan = list(Ramp(4).plan(0, 0, 7, skips))
    assert [step.number for step in plan if step.passed_over] == [3, 5, 6]
    assert [step.samples.start for step in plan] == list(range(0, 28, 4))
