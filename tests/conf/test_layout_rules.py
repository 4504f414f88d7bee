"""Cuts over processes: what cannot work is refused in words, each proposed cure works, and the rest trains."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.batch import with_micro_batch
from conf.compose import attempt, compose
from conf.convert import from_dict
from conf.layout_rules import layout_problems
from conf.problem import Problem
from conf.resolve import to_dict
from conf.schema import Config
from model.config import MoEConfig
from parallel.action_lists import action_lists
from parallel.layout import Layout, layout_of
from parallel.schedules import SCHEDULES, schedule_name, split_layers, stages_per_rank
from tests.conf.cuts import IMPOSSIBLE, MOE, POSSIBLE

IDS = [f"{case[0]} {' '.join(case[1])}" for case in IMPOSSIBLE]


@dataclass(frozen=True)
class Proposal:
    """One of a fix's alternatives."""

    words: tuple[str, ...]
    world: int


def proposals(fix: str, world: int) -> list[Proposal]:
    """`write a=1 or b=2 c=3, or start 4 or 8 processes[: torchrun ...]` taken apart."""
    starting = re.search(r"start ([\d or]+) process(?:es)?(: torchrun --nproc-per-node (\d+) train\.py \.\.\.)?", fix)
    counts = [int(count) for count in starting[1].split(" or ")] if starting else []
    if starting and starting[3]:
        assert int(starting[3]) == counts[0]
    written = re.sub(r"^write |, or write ", " or ", fix.replace(starting[0], "") if starting else fix)
    alternatives = [tuple(shlex.split(text)) for text in re.split(r",? or ", written)]
    assert all("=" in word for words in alternatives for word in words), fix
    return [Proposal((), count) for count in counts] + [Proposal(words, world) for words in alternatives if words]


def subject(problem: Problem) -> tuple[str, str]:
    """Which rule it is, whatever the numbers."""
    return problem.key, re.sub(r"[\d=]+.*", "", problem.rule)


@pytest.mark.parametrize(("world", "overrides", "key", "parts"), IMPOSSIBLE, ids=IDS)
def test_an_impossible_cut_is_answered_with_the_value_the_rule_and_a_fix(
    world: int, overrides: list[str], key: str, parts: list[str]
) -> None:
    problems = attempt(overrides, world=world)[1]
    assert [each.key for each in problems] == [key]
    assert str(problems[0]).startswith(f"{key}={problems[0].value}")
    assert [part for part in parts if part not in str(problems[0])] == []


@pytest.mark.parametrize(("world", "overrides", "key", "parts"), IMPOSSIBLE, ids=IDS)
def test_every_proposed_fix_gives_a_cut_that_works(
    world: int, overrides: list[str], key: str, parts: list[str]
) -> None:
    (problem,) = attempt(overrides, world=world)[1]
    proposed = proposals(problem.fix, world)
    assert proposed
    for each in proposed:
        assert attempt([*overrides, *each.words], world=each.world)[1] == []


@pytest.mark.parametrize(("world", "overrides"), POSSIBLE, ids=[f"{case[0]} {' '.join(case[1])}" for case in POSSIBLE])
def test_a_cut_that_works_is_accepted(world: int, overrides: list[str]) -> None:
    expect_consistent(compose(overrides, world=world), world)


def expect_consistent(config: Config, world: int) -> None:
    """What an accepted configuration promises to those who build from it."""
    parallel, train, model = config.parallel, config.train, config.model
    layout = layout_of(parallel, world)
    assert layout.world == world and (layout.tp, layout.pp, layout.cp) == (parallel.tp, parallel.pp, parallel.cp)
    expect_shared_experts(config, layout)
    micro_batches, rest = divmod(train.global_batch, train.micro_batch * layout.dp)
    assert rest == 0 and micro_batches > 0
    assert layout.cp == 1 or train.seq_len % (2 * layout.cp) == 0
    counts = [model.heads, model.kv_heads, model.vocab_multiple, train.micro_batch * train.seq_len // layout.cp]
    sparse = [model.moe is not None and model.moe.is_sparse(n) for n in range(model.layers)]
    counts += [] if all(sparse) else [model.ffn]
    counts += [model.moe.shared_ffn] if model.moe and any(sparse) else []
    assert [count for count in counts if count % layout.tp] == []
    stages = layout.pp * stages_per_rank(parallel)
    assert sum(parallel.layers_per_stage or split_layers([1.0] * model.layers, stages, 0.5, 1.5)) == model.layers
    if layout.pp > 1:
        lists = action_lists(schedule_name(parallel), layout.pp, stages_per_rank(parallel), micro_batches)
        assert len(lists) == layout.pp


def expect_shared_experts(config: Config, layout: Layout) -> None:
    """Each rank has as many experts, and its replicas of them stand among those of the other parameters."""
    moe, (_, replicas, shards, ep) = config.model.moe, layout.expert_sizes
    assert layout.pp * replicas * shards * ep == layout.world and (ep == 1 or moe is not None)
    assert layout.whole or replicas == layout.replicate
    if moe is not None:
        assert moe.experts % ep == 0 and any(moe.is_sparse(n) for n in range(config.model.layers))
        assert moe.top_k <= moe.groups_chosen * moe.experts // moe.groups


def test_several_faults_are_reported_at_once() -> None:
    overrides = [
        "lr=3", "optim.beta1=2", "parallel.timeout=0", "parallel.tp=3", "train.micro_batch=3", "parallel.schedule=zbv",
        "parallel.vpp=4", "parallel.layers_per_stage=[1,2]", "parallel.zero=7",
    ]  # fmt: skip
    problems = attempt(overrides, world=4)[1]
    assert {each.key for each in problems} == {override.split("=")[0] for override in overrides}
    assert len([each for each in problems if each.key == "parallel.tp"]) == 3  # processes, heads, vocabulary


def test_each_fix_mends_its_own_fault_where_there_are_several() -> None:
    overrides = ["parallel.tp=3", "parallel.pp=2", "train.micro_batch=3", "parallel.vpp=9", "parallel.replicate=5"]
    problems = attempt(overrides, world=8)[1]
    assert len(problems) >= 5
    for problem in problems:
        for each in proposals(problem.fix, 8):
            left = attempt([*overrides, *each.words], world=each.world)[1]
            assert subject(problem) not in map(subject, left), f"{problem}\n{each}"


BLURRED = [
    # refused values, and what must not be judged by the default in their place
    (["parallel.tp=0", "train.micro_batch=8"], "train.micro_batch"),
    (["parallel.tp=two", "train.micro_batch=8"], "train.micro_batch"),
    (["train.global_batch=0", "parallel.pp=2"], "train.micro_batch"),
    (["model.kv_heads=0", "parallel.tp=4"], "parallel.tp"),
    (["model.layers=0", "parallel.pp=4", "train.micro_batch=1"], "parallel.pp"),
    (["parallel.pp=0", "parallel.schedule=zbv", "train.micro_batch=2"], "parallel.schedule"),
    (["parallel.schedule=zbw", "parallel.pp=4", "parallel.vpp=2", "train.micro_batch=1"], "parallel.vpp"),
    (["parallel.cp=0", "parallel.tp=8"], "train.micro_batch"),
    (["parallel.cp=two", "parallel.pp=3"], "parallel.pp"),
    (["parallel.zero=9", MOE, "parallel.ep=8"], "parallel.ep"),
    (["model.moe=8", "parallel.ep=2"], "parallel.ep"),
    (["model.moe.experts=0", MOE, "parallel.ep=32"], "parallel.ep"),
    (["model.moe.experts=many", MOE, "parallel.ep=32"], "parallel.ep"),
    (["parallel.layers_per_stage=[0,4]", "parallel.pp=2", "train.micro_batch=1"], "parallel.layers_per_stage"),
]


@pytest.mark.parametrize(("overrides", "key"), BLURRED, ids=[" ".join(case[0]) for case in BLURRED])
def test_a_refused_value_brings_no_verdict_on_the_cut_that_reads_it(overrides: list[str], key: str) -> None:
    refused = overrides[0].split("=")[0]
    problems = attempt(overrides, world=4)[1]
    assert len([each for each in problems if each.key == refused]) == 1
    assert [each for each in problems if each.key == key != refused] == []


def test_a_batch_that_no_number_of_ranks_divides_is_told_though_the_ranks_are_wrong() -> None:
    problems = attempt(["parallel.tp=0", "train.micro_batch=3"], world=4)[1]
    assert [each.key for each in problems] == ["parallel.tp", "train.micro_batch"]


def test_absurd_numbers_are_answered_at_once() -> None:
    overrides = [
        "parallel.tp=1000000007", "parallel.pp=1000000009", "parallel.vpp=100000", "train.micro_batch=999999937",
        "train.global_batch=999999999989", "model.layers=1000000", "parallel.replicate=1000003",
        "parallel.cp=1000000021", "parallel.ep=1000000033", "model.moe.experts=1000000087", "model.moe.top_k=999999929",
        "model.moe.groups=999999893", "model.moe.groups_chosen=999999937", "model.moe.first_dense=999999883",
    ]  # fmt: skip
    started = time.process_time()
    for world in (1, 7, 16384):
        assert len(attempt(overrides, world=world)[1]) >= 4
    assert time.process_time() - started < 10


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_are_refused_exactly_where_torchs_schedule_cannot_run_them(schedule: str, pp: int) -> None:
    for vpp in (2, 3) if schedule.startswith("interleaved") else (2,) if SCHEDULES[schedule].several else (1,):
        for count in range(1, 3 * pp + 2):
            config = cut_of(schedule=schedule, pp=pp, vpp=vpp, layers=12, global_batch=count, micro_batch=1)
            refused = [each for each in layout_problems(config, pp) if each.key == "train.micro_batch"]
            assert bool(refused) == cannot_run(schedule, pp, vpp, count), (schedule, pp, vpp, count)


def cannot_run(schedule: str, pp: int, vpp: int, micro_batches: int) -> bool:
    try:
        action_lists(schedule, pp, vpp, micro_batches)
    except ValueError:
        return True
    return False


def cut_of(
    layers: int, global_batch: int, micro_batch: int, seq_len: int = 256, moe: MoEConfig | None = None, **parallel: Any
) -> Config:
    """A configuration made without files, for many trials."""
    config = Config()
    return replace(
        config,
        train=replace(config.train, global_batch=global_batch, micro_batch=micro_batch, seq_len=seq_len),
        model=replace(config.model, layers=layers, moe=moe),
        parallel=replace(config.parallel, **parallel),
    )


def applied(config: Config, words: tuple[str, ...]) -> Config:
    raw = to_dict(config)
    for word in words:
        key, _, value = word.partition("=")
        *above, name = key.split(".")
        node = raw
        for part in above:
            node = node[part]
        node[name] = yaml.safe_load(value)
    return from_dict(raw)


def fitting(
    pp: int, tp: int, cp: int, dp: int, micro_batches: int, schedule: str, **settings: Any
) -> tuple[Config, int]:
    """A configuration that divides, and its processes: it is left to the pipeline whether it works."""
    micro_batch = settings["micro_batch"]
    schedule = schedule if pp > 1 else "auto"
    whole = micro_batch * dp * micro_batches
    return cut_of(**settings, pp=pp, tp=tp, cp=cp, schedule=schedule, global_batch=whole), pp * tp * cp * dp


small: dict[str, st.SearchStrategy[Any]] = {
    "layers": st.integers(1, 9),
    "micro_batch": st.integers(1, 6),
    "pp": st.integers(1, 4),
    "vpp": st.none() | st.integers(1, 3),
    "schedule": st.sampled_from(["auto", *SCHEDULES]),
    "zero": st.integers(0, 3),
}
experts = st.builds(
    MoEConfig,
    experts=st.integers(1, 12),
    top_k=st.integers(1, 5),
    ffn=st.sampled_from([24, 100, 192]),
    shared_ffn=st.sampled_from([0, 64, 65]),
    first_dense=st.integers(0, 3),
    every=st.integers(1, 3),
    renormalize=st.booleans(),
    groups=st.integers(1, 4),
    groups_chosen=st.integers(1, 3),
    balance=st.sampled_from(["none", "bias", "sequence", "batch"]),
    bias_rate=st.sampled_from([0.0, 1e-3]),
    aux_coefficient=st.none() | st.just(1e-3),
)
anything = st.builds(
    cut_of,
    **small | {"micro_batch": st.integers(0, 6)},
    global_batch=st.integers(1, 24),
    tp=st.integers(1, 4),
    replicate=st.integers(1, 4),
    cp=st.integers(1, 3),
    cp_exchange=st.sampled_from(["ring", "all_gather"]),
    ep=st.integers(1, 4),
    seq_len=st.sampled_from([250, 252, 256]),
    moe=st.none() | experts,
    layers_per_stage=st.just(()) | st.lists(st.integers(1, 4), max_size=4).map(tuple),
)
likely = st.builds(
    fitting, **small, tp=st.integers(1, 2), cp=st.integers(1, 2), dp=st.integers(1, 3), micro_batches=st.integers(1, 9)
)


@settings(max_examples=120, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.tuples(anything, st.integers(1, 8)) | likely)
def test_a_cut_is_refused_with_fixes_that_mend_it_or_is_consistent(cut: tuple[Config, int]) -> None:
    config, world = cut
    problems = layout_problems(config, world)
    if not problems:
        expect_consistent(with_micro_batch(config, world), world)
    for problem in problems:
        proposed = proposals(problem.fix, world)
        left = [layout_problems(applied(config, each.words), each.world) for each in proposed]
        assert [str(problem) for faults in left if subject(problem) in map(subject, faults)] == []
        # Of a single fault either every fix is whole, or there is none but those that lead to the next fault.
        assert proposed and (problems[1:] or len({faults == [] for faults in left}) == 1), str(problem)
