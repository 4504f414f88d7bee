"""The ranges and the rules of several keys, each with the value, the rule and a fix."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import attempt, compose
from conf.dependence import layout_dependent
from conf.groups import read_groups
from conf.machine import has_wandb_login, usable_cores
from conf.problem import Problem
from conf.schema import Config
from conf.tree import element, leaves, optional
from conf.validate import RANGES, problems

Found = Callable[..., list[Problem]]

MOE = "model=moe_nano"
A, TWO = "{name: a, prefix: p}", "data.sources=[{name: a, prefix: p}, {name: b, prefix: q}]"


def pair(*weights: float) -> str:
    """Two sources with weights."""
    return (
        "data.sources=["
        + ", ".join(f"{{name: {n}, prefix: p, weight: {w}}}" for n, w in zip("ab", weights, strict=True))
        + "]"
    )


BROKEN = [
    # overrides, key, part of the rule, part of the fix
    (["train.steps=0"], "train.steps", "at least 1", "train.steps=1"),
    (["train.steps=null"], "train.steps", "exactly one", "train.steps=200"),
    (["train.tokens=2047"], "train.tokens", "2048 tokens", "train.tokens=2048"),
    (["train.stop_at=201"], "train.stop_at", "200 steps", "train.stop_at=200"),
    (["train.stop_at=0"], "train.stop_at", "at least 1", "1"),
    (["train.micro_batch=5"], "train.micro_batch", "train.global_batch=8", "4 or train.micro_batch=8"),
    (["train.micro_batch=17"], "train.micro_batch", "multiple", "8, or train.global_batch=17"),
    (["train.global_batch=-2"], "train.global_batch", "at least 1", "train.global_batch=8"),
    (["train.eval_every=-1"], "train.eval_every", "at least 0", "train.eval_every=50"),
    (["train.steps=50", "lr_schedule.warmup=50"], "lr_schedule.warmup", "50 steps", "lr_schedule.warmup=5"),
    (["run.seed=-1"], "run.seed", "at least 0", "run.seed=1234"),
    (["model.kv_heads=3"], "model.kv_heads", "model.heads=4", "1, 2, 4"),
    (["model.hidden=260"], "model.hidden", "even multiple", "model.hidden=256"),
    (["model.hidden=4"], "model.hidden", "even multiple", "model.hidden=8"),
    (["model.head_dim=33"], "model.head_dim", "even", "model.head_dim=34"),
    (["model.vocab_size=1"], "model.vocab_size", "at least 2", "model.vocab_size=2"),
    (["model.vocab_size=1000"], "model.vocab_size", "data.vocab_size=8192", "null"),
    (["model.window=0"], "model.window", "at least 1", "model.window=1"),
    (["model.z_loss=-0.1"], "model.z_loss", "at least 0", "model.z_loss=0.0"),
    (["model.rope_scaling.factor=0.5"], "model.rope_scaling.factor", "at least 1", "8.0"),
    (["model.rope_scaling.low_freq_factor=4"], "model.rope_scaling.low_freq_factor", "below", "1.0"),
    (["optim.lr=0"], "optim.lr", "above 0", "optim.lr=null (the default)"),
    (["optim.beta2=1"], "optim.beta2", "below 1", "0.95"),
    (["optim.eps=0"], "optim.eps", "above 0", "1e-08"),
    (["optim.weight_decay=-1"], "optim.weight_decay", "at least 0", "0.1"),
    (["optim.clip=-1"], "optim.clip", "at least 0", "1.0"),
    (["lr_schedule.min_ratio=1.5"], "lr_schedule.min_ratio", "at most 1", "0.1"),
    (["lr_schedule.decay_share=0"], "lr_schedule.decay_share", "above 0", "0.2"),
    (["data.held_out=0.6"], "data.held_out", "at most 0.5", "0.02"),
    (["data.vocab_size=511"], "data.vocab_size", "at least 512", "8192"),
    (["data=indexed"], "data.sources", "at least one source", "data=stdlib"),
    (["data.sources.0.corpus=sdtlib"], "data.sources[0].corpus", "did you mean stdlib", "stdlib"),
    (["data.sources=[{name: a}]"], "data.sources[0]", "exactly one of prefix, corpus, input, dataset", "prefix: PATH"),
    (["data.sources.0.prefix=p"], "data.sources[0]", "not prefix and corpus", "give one"),
    (["data.sources=[{name: a b, prefix: p}]"], "data.sources[0].name", "letters", "name: a-b"),
    (["data.sources.0.validation=p"], "data.sources[0].validation", "data.held_out", "leave it out"),
    (["data.sources.0.subset=en"], "data.sources[0].subset", "goes with dataset", "leave it out"),
    (["data.sources.0.max_documents=0"], "data.sources[0].max_documents", "at least 1", "null"),
    ([f"data.sources=[{A}, {{name: b, corpus: sotu}}]"], "data.tokenizer", "ids of those", "tokenizer of the prefixes"),
    ([f"data.sources=[{A}, {{name: b, prefix: q, weight: 1}}]"], "data.sources", "a has none", "or none"),
    ([pair(0.6, 0.3)], "data.sources", "must add up to 1, not to 0.9", "a: 0.6667, b: 0.3333"),
    ([pair(1, -1)], "data.sources", "at least 0", "write weights"),
    ([pair(0, 0)], "data.sources", "one of them above", "write weights"),
    ([pair(1, 2), "data.temperature=2"], "data.temperature", "gives them weights itself", "one of the two"),
    (["data.temperature=0"], "data.temperature", "above 0", "null"),
    ([TWO, "data.phases=[{weights: {a: 1}}, {weights: {b: 1}}]"], "data.phases[0].tokens", "only the last", ": N"),
    ([TWO, "data.phases=[{tokens: 9}, {}]"], "data.phases[0].tokens", "one sample of train.seq_len=256", "tokens: 256"),
    ([TWO, "data.phases=[{weights: {aa: 1}}]"], "data.phases[0].weights", "did you mean a", "name the sources"),
    ([TWO, "data.phases=[{weights: {}}]"], "data.phases[0].weights", "names no source", "null"),
    ([TWO, "data.phases=[{weights: {a: 0.5, b: 0.4}}]"], "data.phases[0].weights", "add up to 1", "a: 0.5556"),
    ([TWO, "data.phases=[{weights: {a: x}}]"], "data.phases[0].weights.a", "must be a finite number", "0.001"),
    ([TWO, "data.phases=[{weights: 3}]"], "data.phases[0].weights", "names, each with a finite number", "NAME"),
    ([TWO, "data.phases=[{weights: {a: 1}}]", "data.temperature=2"], "data.temperature", "weights of its own", "out"),
    (["train.batch_ramp=[{tokens: 0, global_batch: 4}]"], "train.batch_ramp[0].tokens", "at least 1", "tokens: 1"),
    (["train.batch_ramp=[{tokens: 1000, global_batch: 3}]", "train.micro_batch=2"], "train.batch_ramp[0].global_batch",
     "train.global_batch=3 must be a multiple", "suits the layout"),
    (["train.skip_steps=[{first: 5, last: 4}]"], "train.skip_steps[0]", "not behind the last", "first: 5"),
    (["train.skip_steps=[{first: 201}]"], "train.skip_steps[0]", "the run's 200", "last: N"),
    (["data=indexed", "data.sources=[{name: '', prefix: p}]"], "data.sources[0].name", "empty", "web"),
    (["data=indexed", "data.sources=[{name: a, prefix: ''}]"], "data.sources[0].prefix", "empty", "PATH"),
    (["data=indexed", "data.sources=[{name: a, prefix: p.bin}]"], "data.sources[0].prefix", "without", ": p"),
    (["run.name=a/b"], "run.name", "no /", "run.name=a-b"),
    (["run.name=.."], "run.name", ". or ..", "run.name=mine"),
    (["run.name="], "run.name", "empty", "run.name=mine"),
    (["run.name=" + "x" * 121], "run.name", "120 bytes", "run.name=x"),
    (['run.name="a\tb"'], "run.name", "printable", "run.name=a-b"),
    (["model.name=a/b"], "model.name", "no /", "model.name=a-b"),
    (["run.dir="], "run.dir", "folder", "run.dir=runs"),
    (["checkpoint.resume=atuo"], "checkpoint.resume", "auto, none", "checkpoint.resume=auto"),
    (["checkpoint.allow=[optim.lrr]"], "checkpoint.allow", "did you mean optim.lr", "optim.lr"),
    (["checkpoint.every=-1"], "checkpoint.every", "at least 0", "100"),
    (["checkpoint.keep=-1"], "checkpoint.keep", "at least 0", "checkpoint.keep=2"),
    (["checkpoint.keep_every=30", "checkpoint.every=20"], "checkpoint.keep_every", "multiple", "keep_every=40"),
    (["checkpoint.on_failure=x"], "checkpoint.on_failure", "go_on, stop", "on_failure=go_on"),
    (["checkpoint.load="], "checkpoint.load", "a checkpoint or a run", "checkpoint.load=runs/NAME"),
    (["checkpoint.load=x", "checkpoint.resume=y"], "checkpoint.load", "not both", "leave one"),
    (["checkpoint.load_except=[a]"], "checkpoint.load_except", "nothing is loaded", "checkpoint.load=PATH"),
    (["run.name=x", "checkpoint.local=runs/x/checkpoints"], "checkpoint.local", "another folder", "/FAST/x"),
    (["train.max_hours=0"], "train.max_hours", "above 0", "train.max_hours=null"),
    (["health.sigma=0"], "health.sigma", "above 0", "health.sigma=6.0"),
    (["health.window=7"], "health.window", "at least 8", "health.window=128"),
    (["health.straggler=1"], "health.straggler", "above 1", "health.straggler=1.06"),
    (["health.limits.data=-1"], "health.limits.data", "at least 0", "health.limits.data=600"),
    (["health.limits.compute=600"], "health.limits.compute", "parallel.timeout=600", "health.limits.compute=300"),
    (["health.spike=rollback", "checkpoint.every=0"], "health.spike", "saves none", "checkpoint.every=100"),
    (["health.pass_over=0"], "health.pass_over", "at least 1", "health.pass_over=1"),
    (["health.locate=-1"], "health.locate", "at least 0", "health.locate=1"),
    (["metrics.replica_check=-1"], "metrics.replica_check", "at least 0", "metrics.replica_check=500"),
    (["debug.inject=[{kind: zap, step: 3}]"], "debug.inject[0].kind", "one of kill, hang", "kill"),
    (["debug.inject=[{kind: kill, step: 0}]"], "debug.inject[0].step", "from 1 to 200", "step: 1"),
    (["debug.inject=[{kind: kill, step: 3, rank: 1}]"], "debug.inject[0].rank", "no such rank among 1", "rank: 0"),
    (["debug.inject=[{kind: nan, step: 3, layer: 4}]"], "debug.inject[0].layer", "from 0 to 3", "layer: 3"),
    (["debug.inject=[{kind: nan, step: 3, micro_batch: 8}]"], "debug.inject[0].micro_batch", "0 to 7", ": 7"),
    (["debug.inject=[{kind: slow, step: 3, factor: 1}]"], "debug.inject[0].factor", "above 1", "factor: 3.0"),
    (["debug.inject=[{kind: slow, step: 3, last: 2}]"], "debug.inject[0].last", "from 3 to 200", "last: 3"),
    (["metrics.every=0"], "metrics.every", "at least 1", "metrics.every=1"),
    (["metrics.peak_tflops=0"], "metrics.peak_tflops", "above 0", "metrics.peak_tflops=null (the default)"),
    (["metrics.wandb=online"], "metrics.wandb", "WANDB_API_KEY", "metrics.wandb=offline"),
    (["metrics.wandb_project=a/b"], "metrics.wandb_project", "without", "tatara"),
    (["metrics.wandb_tags=['']"], "metrics.wandb_tags", "1 to 64", "shorten"),
    (["precision=bf16", "precision.matmul=high"], "precision.matmul", "name=bf16", "precision=fp32"),
    (["train.recompute_n=0"], "train.recompute_n", "at least 1", "train.recompute_n=2 (the default)"),
    (["parallel.tp=0"], "parallel.tp", "at least 1", "parallel.tp=1"),
    (["parallel.pp=-1"], "parallel.pp", "at least 1", "parallel.pp=1"),
    (["parallel.vpp=0"], "parallel.vpp", "at least 1", "parallel.vpp=1"),
    (["parallel.zero=4"], "parallel.zero", "at most 3", "parallel.zero=1 (the default)"),
    (["parallel.replicate=0"], "parallel.replicate", "at least 1", "parallel.replicate=1"),
    (["parallel.timeout=0"], "parallel.timeout", "at least 1", "parallel.timeout=600"),
    (["parallel.layers_per_stage=[2,0,2]"], "parallel.layers_per_stage", "each item must be at least 1", "=[]"),
    (["parallel.cp=0"], "parallel.cp", "at least 1", "parallel.cp=1 (the default)"),
    (["parallel.ep=0"], "parallel.ep", "at least 1", "parallel.ep=1 (the default)"),
    ([MOE, "model.moe.experts=0"], "model.moe.experts", "at least 1", "=16 (the default)"),
    ([MOE, "model.moe.ffn=0"], "model.moe.ffn", "at least 1", "=192 (the default)"),
    ([MOE, "model.moe.shared_ffn=-8"], "model.moe.shared_ffn", "at least 0", "=0 (the default)"),
    ([MOE, "model.moe.every=0"], "model.moe.every", "at least 1", "=1 (the default)"),
    ([MOE, "model.moe.scale=0"], "model.moe.scale", "above 0", "=1.0 (the default)"),
    ([MOE, "model.moe.bias_rate=-1"], "model.moe.bias_rate", "at least 0", "=0.001 (the default)"),
    ([MOE, "model.moe.aux_coefficient=-1"], "model.moe.aux_coefficient", "at least 0", "model.moe.aux_coefficient=0"),
    ([MOE, "model.moe.capacity_factor=0"], "model.moe.capacity_factor", "above 0", "=null (the default)"),
    (["train.threads=100000"], "train.threads", "core", "train.threads="),
    (["+extra.api_key=abc"], "extra.api_key", "secret", "environment"),
    (["+extra.a={hfToken: abc}"], "extra.a.hfToken", "secret", "environment"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "rule", "fix"), BROKEN, ids=[" ".join(case[0]) for case in BROKEN])
def test_a_broken_rule_is_answered_with_the_key_the_rule_and_a_fix(
    found: Found, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    (problem,) = found(*overrides)
    assert problem.key == key
    assert rule in problem.rule
    assert fix in problem.fix


KEPT = [
    ["train.stop_at=200"], ["train.tokens=300000"], ["model.head_dim=30", "model.hidden=250"],
    ["checkpoint.allow=[optim.*, data.sources]"], ["data.held_out=0"],
    ["extra.tokenizer_note=x", "extra.monkey=1"],
    ["data=indexed", TWO, "data.tokenizer=t.model"], [pair(0.6, 0.4)],
    [pair(7, 3)], ["train.batch_ramp=[{tokens: 1, global_batch: 4}]"],
    [TWO, "data.temperature=2", "data.phases=[{tokens: 512, weights: {a: 1}}, {}]"],
    ["checkpoint.resume=runs/x"], ["optim.clip=0"],
    ["precision.matmul=high"], ["train.recompute=every_n", "train.recompute_n=1"], ["train.recompute_n=3"],
    ["parallel.vpp=1"], ["parallel.zero=0"], ["parallel.zero=3"], ["train.recompute=selective"],
    ["lr_schedule.warmup=0", "train.steps=1"], ["run.name=my-run_1.0"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", KEPT, ids=[" ".join(case) for case in KEPT])
def test_a_setting_at_the_edge_of_a_rule_is_accepted(found: Found, overrides: list[str]) -> None:
    assert found(*overrides) == []


BROKEN_EXPERTS = [
    # overrides of moe_nano, key, part of the rule, the fixes
    (["model.moe.top_k=17"], "model.moe.top_k", "model.moe.experts=16",
     ["model.moe.top_k=16", "model.moe.experts=17"]),
    (["model.moe.groups=3"], "model.moe.groups", "must divide model.moe.experts=16",
     ["model.moe.groups=2", "model.moe.groups=4", "model.moe.experts=18"]),
    (["model.moe.groups=16", "model.moe.groups_chosen=8"], "model.moe.groups", "2 experts at least",
     ["model.moe.groups=8", "model.moe.experts=32"]),
    (["model.moe.groups=2", "model.moe.groups_chosen=3"], "model.moe.groups_chosen", "model.moe.groups=2",
     ["model.moe.groups_chosen=2", "model.moe.groups=4"]),
    (["model.moe.groups_chosen=2"], "model.moe.groups_chosen", "model.moe.groups=1",
     ["model.moe.groups_chosen=1", "model.moe.groups=2"]),
    (["model.moe.groups=8"], "model.moe.top_k", "1 * 2 = 2 experts",
     ["model.moe.top_k=2", "model.moe.groups_chosen=2", "model.moe.groups=4"]),
    (["model.moe.first_dense=4"], "model.moe.first_dense", "leaves no block with experts: model.layers=4",
     ["model.moe.first_dense=3", "model.layers=5"]),
    (["model.moe.balance=none", "model.moe.aux_coefficient=0.01"], "model.moe.aux_coefficient", "balance=none",
     ["model.moe.aux_coefficient=null", "model.moe.balance=sequence"]),
    (["model.moe.balance=sequence", "model.moe.bias_rate=0.01"], "model.moe.bias_rate", "balance=sequence",
     ["model.moe.bias_rate=0.001", "model.moe.balance=bias"]),
    (["model.moe.top_k=1"], "model.moe.renormalize", "router learns nothing",
     ["model.moe.renormalize=false", "model.moe.top_k=2"]),
    (["model.bias=true"], "model.bias", "experts have no biases", ["model.bias=false", "model.moe=null"]),
    (["model.moe.ffn=100"], "model.moe.ffn", "multiple of 8", ["model.moe.ffn=96", "model.moe.ffn=104"]),
    (["model.hidden=260", "model.heads=2"], "model.hidden", "multiple of 8", ["model.hidden=256", "model.hidden=264"]),
]  # fmt: skip
EXPERTS_IDS = [" ".join(case[0]) for case in BROKEN_EXPERTS]


@pytest.mark.parametrize(("overrides", "key", "rule", "fixes"), BROKEN_EXPERTS, ids=EXPERTS_IDS)
def test_experts_that_cannot_be_are_answered_with_the_rule_and_with_fixes_that_work(
    found: Found, overrides: list[str], key: str, rule: str, fixes: list[str]
) -> None:
    (problem,) = found(MOE, *overrides)
    assert problem.key == key and rule in problem.rule
    assert re.split(r",? or ", problem.fix.removeprefix("write ")) == fixes
    assert [left for fix in fixes for left in found(MOE, *overrides, fix)] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.moe.balance=none"], ["model.moe.balance=batch", "model.moe.capacity_factor=1.25"],
        ["model.moe.score=softmax"], ["model.moe.groups=4", "model.moe.groups_chosen=2"], ["model.moe.top_k=16"],
        ["model.moe.top_k=1", "model.moe.renormalize=false", "model.moe.score=softmax"], ["model.moe.bias_rate=0"],
        ["model.moe.balance=bias", "model.moe.aux_coefficient=1e-4"], ["model.moe.every=9"],
        ["model.moe.first_dense=3"], ["model.moe.groups=2", "model.moe.groups_chosen=2", "model.moe.top_k=16"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_experts_at_the_edge_of_a_rule_are_accepted(found: Found, overrides: list[str]) -> None:
    assert found(MOE, *overrides) == []


def test_what_depends_on_the_layout_is_told_in_sentences() -> None:
    assert layout_dependent(compose([MOE])) == layout_dependent(compose(["precision=bf16"])) == []
    config = compose([MOE, "model.moe.balance=batch", "model.moe.capacity_factor=1.5"])
    batch, capacity = layout_dependent(config)
    assert batch.startswith("model.moe.balance=batch: ") and "layout" in batch
    assert capacity.startswith("model.moe.capacity_factor=1.5: ") and "layout" in capacity
    for recipe in ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8"):
        (scales,) = layout_dependent(compose([f"precision={recipe}"]))
        assert scales.startswith(f"precision={recipe}: ") and "train.micro_batch" in scales


@pytest.mark.parametrize("model", read_groups().choices["model"])
def test_every_model_of_the_repository_keeps_the_rules(found: Found, model: str) -> None:
    assert found(f"model={model}") == []


def test_every_number_of_the_schema_has_a_range() -> None:
    kinds = {key: optional(leaf.kind)[0] for key, leaf in leaves().items()}
    numbers = {key for key, kind in kinds.items() if kind in (int, float) or element(kind) in (int, float)}
    assert numbers == {each.key for each in RANGES}


def test_all_defaults_are_inside_their_ranges() -> None:
    defaults = {key: leaf.default for key, leaf in leaves().items()}
    numbers = [(each, defaults[each.key]) for each in RANGES if defaults[each.key] not in (None, ())]
    assert [each.key for each, default in numbers if not each.holds(default)] == []


@pytest.mark.parametrize("value", [0, -1])
def test_no_number_of_the_schema_makes_the_rules_stumble(found: Found, value: int) -> None:
    named = {each.key for each in found(*(f"{rule.key}={value}" for rule in RANGES))}
    assert named >= {rule.key for rule in RANGES if not rule.holds(value)}


def test_source_names_must_differ(found: Found) -> None:
    sources = "data.sources=[{name: a, prefix: p}, {name: a, prefix: q}]"
    rules = [each.rule for each in found("data=indexed", sources)]
    assert any("has this name already" in rule for rule in rules)


def test_a_secret_is_never_shown(found: Found) -> None:
    assert "hunter2" not in "".join(str(each) for each in found("+extra.password=hunter2"))


def test_threads_up_to_the_cores_are_accepted(found: Found) -> None:
    assert found(f"train.threads={usable_cores()}") == []


def test_cuda_is_refused_exactly_where_torch_has_none() -> None:
    import torch

    refused = [each.key for each in attempt(["train.device=cuda"])[1]]
    assert refused == ([] if torch.cuda.is_available() else ["train.device"])


@pytest.mark.parametrize(("asked", "refused"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_more_processes_than_devices_on_a_host_are_refused(
    found: Found, monkeypatch: pytest.MonkeyPatch, asked: str, refused: bool
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert found(f"train.device={asked}") == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    problems = found(f"train.device={asked}")
    assert [each.key for each in problems] == (["train.device"] if refused else [])
    assert all("has 2 for 4" in each.rule and "--nproc-per-node 2" in each.fix for each in problems)


def test_a_wandb_login_is_found_in_the_environment_or_in_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not has_wandb_login()
    place = tmp_path / "netrc"
    place.write_text("machine elsewhere.example login user password x\n")
    place.chmod(0o600)
    monkeypatch.setenv("NETRC", str(place))
    assert not has_wandb_login()
    place.write_text("machine api.wandb.ai login user password x\n")
    assert has_wandb_login()
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert compose(["metrics.wandb=online"]).metrics.wandb == "online"


def test_run_dir_may_not_be_a_file(found: Found, somewhere_empty: Path) -> None:
    (somewhere_empty / "taken").write_text("")
    (problem,) = found("run.dir=taken")
    assert "is a file" in problem.rule


def test_the_rules_read_a_config_however_it_was_made() -> None:
    config = compose([])
    broken = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=-1.0))
    assert [each.key for each in problems(broken)] == ["optim.lr"]
    assert problems(config) == []
    assert isinstance(config, Config)
