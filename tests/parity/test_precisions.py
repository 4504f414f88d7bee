"""fp32 and bf16 in every kind of layout, fp16 in some: within the published tolerances of one process."""

import pytest

from parallel.config import ParallelConfig as P
from tests.parity.cases import MODEL, TIED, cases, check, config_of, pipe

QUICK = {
    ("pp2 dp2 interleaved_zb zero2", "bf16"), ("hsdp 2x2 zero2", "bf16"), ("tp2 pp2", "fp32"), ("tp2", "bf16"),
    ("pp2 dp2 interleaved_zb zero2", "fp16"),
}  # fmt: skip
LAYOUTS = {
    "dp2 zero0": (2, P(zero=0), TIED, "none"),
    "dp2 zero1": (2, P(), MODEL, "none"),
    "dp4 zero3": (4, P(zero=3), TIED, "full"),
    "tp2": (2, P(tp=2), MODEL, "none"),
    "tp4": (4, P(tp=4), TIED, "none"),
    "pp2": (2, P(pp=2), TIED, "none"),
    "pp2 vpp2": (2, P(pp=2, vpp=2), MODEL, "none"),
    "pp2 dp2 interleaved_zb zero2": (4, pipe("interleaved_zb", zero=2), MODEL, "none"),
    "pp2 dp2 zbv zero3": (4, pipe("zbv", zero=3), TIED, "full"),
    "pp2 dp2 dualpipev zero1": (4, pipe("dualpipev"), MODEL, "none"),
    "pp2 zbv": (2, pipe("zbv"), MODEL, "none"),
    "hsdp 2x2 zero2": (4, P(replicate=2, zero=2), MODEL, "none"),
    "tp2 pp2": (4, P(tp=2, pp=2), MODEL, "none"),
    "tp2 pp2 dp2": (8, P(tp=2, pp=2), TIED, "none"),
}
HALF = {
    "dp2 zero0", "dp2 zero1", "dp4 zero3", "tp2", "tp2 pp2", "pp2 zbv", "pp2 dp2 interleaved_zb zero2",
    "hsdp 2x2 zero2", "tp2 pp2 dp2",
}  # fmt: skip
"""What fp16 is shown in: every ZeRO stage, both kinds of backward passes, and norms whose ranks must agree."""
CASES = {
    (name, kind): (kind, *layout)
    for name, layout in LAYOUTS.items()
    for kind in ("fp32", "bf16", *(("fp16",) if name in HALF else ()))
}


@pytest.mark.parametrize("precision, ranks, parallel, model, recompute, steps", cases(CASES, QUICK))
def test_a_layout_stays_within_the_tolerance(
    reference, trial_corpus, precision, ranks, parallel, model, recompute, steps
):
    config = config_of(parallel, ranks, model, precision, recompute, steps)
    check(reference, trial_corpus, config, ranks)
