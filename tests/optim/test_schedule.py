"""Learning rates as the formulas say."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.config import OptimConfig, ScheduleConfig
from optim.schedule import lr_share, peak_lr, warmup_steps

NAMES = ["cosine", "wsd", "linear", "constant"]


@given(
    name=st.sampled_from(NAMES), shape=st.sampled_from(["linear", "cosine", "sqrt"]), warmup=st.integers(0, 20),
    total=st.integers(21, 300), minimum=st.floats(0, 1), decay=st.floats(0.01, 1),
)  # fmt: skip
def test_every_schedule_rises_to_the_peak_then_never_rises(name, shape, warmup, total, minimum, decay):
    config = ScheduleConfig(name, warmup, minimum, decay, shape)
    shares = [lr_share(config, step, total) for step in range(total)]
    assert all(minimum - 1e-12 <= s <= 1 + 1e-12 for s in shares[warmup:])
    assert shares[:warmup] == [(s + 1) / warmup for s in range(warmup)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(shares[warmup:]))


def test_cosine_is_halfway_in_the_middle():
    config = ScheduleConfig("cosine", 0, 0.1)
    assert lr_share(config, 49, 100) == pytest.approx(0.55)
    assert lr_share(config, 24, 100) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear"])
def test_the_last_step_has_the_minimum(name):
    assert lr_share(ScheduleConfig(name, 5, 0.1), 99, 100) == pytest.approx(0.1)


def test_constant_stays():
    assert lr_share(ScheduleConfig("constant", 5, 0.1), 99, 100) == 1.0


@pytest.mark.parametrize("shape, middle", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_wsd_is_flat_and_then_decays_in_its_shape(shape, middle):
    config = ScheduleConfig("wsd", 0, 0.0, 0.2, shape)
    assert lr_share(config, 79, 100) == pytest.approx(1.0)
    assert lr_share(config, 89, 100) == pytest.approx(middle)


def test_warmup_by_itself_is_a_tenth_of_the_run_and_at_most_2000_steps():
    auto = ScheduleConfig()
    assert [warmup_steps(auto, total) for total in (6, 300, 10**6)] == [0, 30, 2000]
    assert warmup_steps(ScheduleConfig(warmup=7), 300) == 7


def test_the_peak_is_the_given_one_or_falls_with_the_width():
    assert peak_lr(OptimConfig(lr=1e-4), 4096) == 1e-4
    published = {768: 6e-4, 4096: 3e-4, 8192: 1.5e-4, 16384: 8e-5}  # GPT-3 125M; Llama 3 8B, 70B, 405B
    for hidden, lr in published.items():
        assert 0.5 < peak_lr(OptimConfig(), hidden) / lr < 2
