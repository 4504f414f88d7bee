"""FP8 in any layout: with all else in fp64, the losses and the scales of one process.

Rounding to FP8 magnifies the differences between layouts that bf16 has, so that nothing is proven in bf16. In fp64 the
same values are rounded to the same FP8 unless one lies within 1e-16 of a border.
"""

from functools import cache
from unittest.mock import patch

import pytest

from launch.spawn import run_ranks
from parallel.config import ParallelConfig as P
from parallel.fp8.state import FP8
from parallel.mesh import ALONE
from tests.parity.cases import cases, pipe
from tests.parity.fp8 import EXPERTS, WIDE, fp8_config, scales_after

STEPS = 6  # more than the history holds
LAYOUTS = {
    "dp2": (2, P(), WIDE, "none"),
    "dp2 zero3 full": (2, P(zero=3), WIDE, "full"),
    "dp4 zero2": (4, P(zero=2), WIDE, "every_n"),
    "tp2": (2, P(tp=2), WIDE, "selective"),
    "cp2": (2, P(cp=2), WIDE, "full"),
    "pp2": (2, P(pp=2), WIDE, "none"),
    "pp2 interleaved_zb zero2 full": (4, pipe("interleaved_zb", zero=2), WIDE, "full"),
    "pp2 zbv tp2": (4, pipe("zbv", tp=2), EXPERTS, "none"),
    "experts dp2": (2, P(), EXPERTS, "none"),
    "ep2 full": (2, P(ep=2), EXPERTS, "full"),
    "ep2 dp2 zero3": (4, P(ep=2, zero=3), EXPERTS, "none"),
    "ep4 over tp2 cp2": (4, P(ep=4, tp=2, cp=2), EXPERTS, "none"),
    "pp2 ep2": (4, P(pp=2, ep=2), EXPERTS, "none"),
}
QUICK = {"dp2 zero3 full", "pp2 interleaved_zb zero2 full", "ep4 over tp2 cp2"}


@pytest.fixture(scope="module")
def whole(trial_corpus):
    """Losses and scales of one process, kept for the next layout."""

    @cache
    def of(model, steps):
        return run_ranks(scales_after, 1, fp8_config(P(), 1, model), trial_corpus, steps)[0]

    return of


@pytest.mark.parametrize("ranks, parallel, model, recompute, steps", cases(LAYOUTS, QUICK, STEPS))
def test_a_layout_has_the_losses_and_the_scales_of_one_process(
    whole, trial_corpus, ranks, parallel, model, recompute, steps
):  # fmt: skip
    config = fp8_config(parallel, ranks, model, recompute=recompute)
    losses, scales = whole(model, steps)
    for own_losses, own_scales in run_ranks(scales_after, ranks, config, trial_corpus, steps):
        assert own_losses == pytest.approx(losses, rel=1e-9)
        assert own_scales
        for (name, first), (scale, history) in own_scales.items():
            all_scales, all_histories = scales[name, 0]
            assert scale == all_scales[first * 3 : first * 3 + len(scale)], name
            at = first * 3 * (len(history) // len(scale))
            assert history == all_histories[at : at + len(history)], name


def alone():
    """Ranks keep their maxima to themselves."""
    init = FP8.__init__
    patch.object(FP8, "__init__", lambda self, config, layers, *_: init(self, config, layers, ALONE, ALONE)).start()


def experts_with_all():
    """Experts' maxima are shared among all ranks of the stage, whichever experts they have."""
    init = FP8.__init__
    patch.object(
        FP8, "__init__", lambda self, config, layers, dense, _: init(self, config, layers, dense, dense)
    ).start()


@pytest.mark.parametrize("wrong, parallel", [(alone, P()), (alone, P(tp=2)), (experts_with_all, P(ep=2))])
def test_maxima_shared_among_the_wrong_ranks_are_found(whole, trial_corpus, wrong, parallel):
    config = fp8_config(parallel, 2, EXPERTS)
    found = run_ranks(scales_after, 2, config, trial_corpus, 2, wrong)
    assert found[0][0] != pytest.approx(whole(EXPERTS, 2)[0], rel=1e-6)
