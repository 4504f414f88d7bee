"""What goes against Transformer Engine: refused where it is asked for, a reason to emulate where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conf.compose import attempt
from conf.precision_rules import te_obstacle
from conf.problem import Problem

Found = Callable[..., list[Problem]]

TE = "precision.fp8.backend=te"
BEYOND = [
    # overrides, key, part of the rule, part of the fix
    (["parallel.zero=3"], "parallel.zero", "frees weights", "parallel.zero=2"),
    (["parallel.pp=2", "parallel.schedule=zbv"], "parallel.schedule", "gradients of weights later", "interleaved"),
    (["parallel.pp=2", "parallel.vpp=2"], "parallel.vpp", "histories of all stages", "precision=fp8_current"),
    (["model.ffn=760"], "model.ffn", "products of size 760", "parallel.tp"),
    (["train.seq_len=250", "train.micro_batch=1"], "train.micro_batch", "products of size 250", "change it"),
    (["model=moe_nano"], "precision.fp8.experts", "a parameter for each expert", "precision.fp8.experts=false"),
]


@pytest.mark.parametrize(("overrides", "key", "rule", "fix"), BEYOND, ids=[" ".join(case[0]) for case in BEYOND])
def test_what_transformer_engine_cannot_do_is_refused_with_a_fix_and_otherwise_emulated(
    found: Found, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    (problem,) = [each for each in found("precision=fp8_delayed", TE, *overrides) if each.key == key]
    assert rule in problem.rule
    assert fix in problem.fix
    assert "precision.fp8.backend=emulate" in problem.fix
    config, problems = attempt(["precision=fp8_delayed", *overrides])
    assert not [each for each in problems if each.key == key]
    assert config is not None
    assert key in (te_obstacle(config) or "")


KEPT = [
    ["precision=fp8_delayed"],
    ["precision=fp8_delayed", "parallel.zero=2"],
    ["precision=fp8_delayed", "parallel.pp=2", "parallel.schedule=gpipe"],
    ["precision=fp8_current", "parallel.pp=2", "parallel.vpp=2"],
    ["precision=mxfp8", "model=moe_nano", "precision.fp8.experts=false"],
    ["precision=fp8_block", "model=moe_nano", "model.moe.first_dense=2", "precision.fp8.last_bf16=2"],
]


@pytest.mark.parametrize("overrides", KEPT, ids=[" ".join(case) for case in KEPT])
def test_transformer_engine_may_be_asked_for_in_other_runs(found: Found, overrides: list[str]) -> None:
    keys = {each.key for each in found(TE, *overrides)}
    assert not keys & {case[1] for case in BEYOND}
