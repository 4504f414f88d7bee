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

from conf.compose import attempt, compose
from conf.convert import from_dict
from conf.layout_rules import layout_problems
from conf.problem import Problem
from conf.resolve import to_dict
from conf.schema import Config
from parallel.action_lists import action_lists
from parallel.layout import layout_of
from parallel.schedules import SCHEDULES, schedule_name, split_layers, stages_per_rank

DEEP = "model.layers=8"
IMPOSSIBLE = [
    # processes, overrides, key, parts of the message
    (1, ["parallel.tp=2"], "parallel.tp",
     ["2 * 1 = 2 processes", "torchrun --nproc-per-node 2 train.py", "parallel.tp=1"]),
    (1, ["parallel.pp=2", "train.micro_batch=4"], "parallel.pp",
     ["1 * 2 = 2", "start 2 processes", "--nproc-per-node 2"]),
    (1, ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=4"], "parallel.tp", ["2 * 2 = 4", "--nproc-per-node 4"]),
    (6, ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=2"], "parallel.pp",
     ["but it is 6", "start 4 or 8 processes", "parallel.tp=2 parallel.pp=3"]),
    (5, ["parallel.tp=2", "train.micro_batch=1"], "parallel.tp", ["multiple of 2", "start 4 or 8 processes"]),
    (2, ["train.micro_batch=8"], "train.micro_batch",
     ["2 data-parallel ranks", "train.micro_batch=4", "train.global_batch=16", "parallel.tp=2"]),
    (3, ["train.micro_batch=8"], "train.global_batch",
     ["3 data-parallel ranks", "train.global_batch=9 train.micro_batch=3", "start 1 process"]),
    (4, ["train.micro_batch=3"], "train.micro_batch", ["train.global_batch=8", "train.micro_batch=2"]),
    (8, ["parallel.tp=2", "train.micro_batch=4"], "train.micro_batch",
     ["8 processes, 2 to a model", "train.micro_batch=2"]),
    (16, ["train.micro_batch=1"], "train.global_batch", ["16 data-parallel ranks", "16", "start 8 processes"]),
    (4, ["parallel.replicate=3", "train.micro_batch=2"], "parallel.replicate",
     ["4 data-parallel", "replicate=2", "replicate=4"]),
    (2, ["parallel.replicate=4", "train.micro_batch=4"], "parallel.replicate", ["must divide", "replicate=2"]),
    (4, ["parallel.zero=0", "parallel.replicate=2", "train.micro_batch=2"], "parallel.replicate",
     ["zero=0, which shares nothing", "replicate=1", "replicate=4", "zero=1"]),
    (4, ["parallel.tp=4"], "parallel.tp", ["model.kv_heads=2", "parallel.tp=2 parallel.pp=1"]),
    (2, ["parallel.tp=2", "model.heads=3", "model.kv_heads=3", "model.hidden=240"], "parallel.tp",
     ["model.heads=3 and model.kv_heads=3", "parallel.tp=1 parallel.pp=2"]),
    (2, ["parallel.tp=2", "model.ffn=767"], "parallel.tp", ["model.ffn=767", "model.ffn=768"]),
    (2, ["parallel.tp=2", "model.vocab_multiple=125"], "parallel.tp", ["model.vocab_multiple=125", "=250"]),
    (2, ["parallel.tp=2", "train.seq_len=255", "train.micro_batch=1"], "parallel.tp",
     ["1 * 255 = 255", "train.micro_batch=2", "train.seq_len=256"]),
    (8, ["parallel.pp=8", "train.micro_batch=1"], "parallel.pp", ["8 stages", "model.layers=4", "parallel.pp=4"]),
    (4, ["parallel.pp=4", "parallel.vpp=2", "train.micro_batch=2"], "parallel.pp", ["2 a rank", "parallel.vpp=null"]),
    (2, ["parallel.pp=2", "parallel.vpp=4", "train.micro_batch=4"], "parallel.pp", ["8 stages", "parallel.vpp=2"]),
    (4, ["parallel.pp=4", "parallel.schedule=zbv", "train.micro_batch=1"], "parallel.pp",
     ["8 stages", "schedule=1f1b"]),
    (2, ["parallel.vpp=2", "train.micro_batch=4"], "parallel.vpp",
     ["parallel.pp=1", "parallel.vpp=null", "parallel.pp=2"]),
    (2, ["parallel.pp=2", "parallel.schedule=1f1b", "parallel.vpp=2", "train.micro_batch=4"], "parallel.vpp",
     ["one stage", "vpp=null", "schedule=interleaved"]),
    (2, ["parallel.pp=2", "parallel.schedule=gpipe", "parallel.vpp=2"], "parallel.vpp",
     ["gpipe", "schedule=interleaved"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=1", "train.micro_batch=4"], "parallel.vpp",
     ["at least 2 stages", "schedule=1f1b"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved_zb", "parallel.vpp=1", "train.micro_batch=4"], "parallel.vpp",
     ["interleaved_zb has at least 2", "vpp=null"]),
    (2, ["parallel.pp=2", "parallel.schedule=zbv", "parallel.vpp=3", DEEP], "parallel.vpp",
     ["exactly 2", "interleaved"]),
    (2, ["parallel.pp=2", "parallel.schedule=dualpipev", "parallel.vpp=1", "train.micro_batch=2"], "parallel.vpp",
     ["dualpipev has exactly 2", "vpp=null"]),
    (1, ["parallel.schedule=1f1b"], "parallel.schedule", ["parallel.pp=1", "parallel.schedule=auto"]),
    (2, ["parallel.schedule=zbv", "train.micro_batch=4"], "parallel.schedule",
     ["parallel.pp=1", "parallel.tp=1 parallel.pp=2"]),
    (1, ["parallel.layers_per_stage=[4]"], "parallel.layers_per_stage", ["parallel.pp=1", "layers_per_stage=[]"]),
    (2, ["parallel.pp=2", "parallel.layers_per_stage=[1,2,1]", "train.micro_batch=4"], "parallel.layers_per_stage",
     ["3 entries", "2 stages", "[2, 2]"]),
    (2, ["parallel.pp=2", "parallel.vpp=2", "parallel.layers_per_stage=[2,2]", "train.micro_batch=4"],
     "parallel.layers_per_stage", ["4 stages", "[1, 1, 1, 1]"]),
    (2, ["parallel.pp=2", "parallel.layers_per_stage=[1,2]", "train.micro_batch=4"], "parallel.layers_per_stage",
     ["adds up to 3", "model.layers=4", "[2, 2]"]),
    (2, ["parallel.pp=2", "train.micro_batch=8"], "train.micro_batch",
     ["1f1b", "at least 2", "= 1", "train.micro_batch=4", "train.global_batch=16"]),
    (4, ["parallel.pp=2", "train.micro_batch=4"], "train.micro_batch",
     ["4 processes, 2 to a model", "train.micro_batch=2"]),
    (4, ["parallel.pp=4", "parallel.schedule=dualpipev", "train.micro_batch=2", DEEP], "train.micro_batch",
     ["at least 8 micro-batches", "train.micro_batch=1", "train.global_batch=16"]),
    (2, ["parallel.pp=2", "parallel.vpp=2", "train.global_batch=10", "train.micro_batch=2"], "train.micro_batch",
     ["5 micro-batches in 2 equal rounds", "train.micro_batch=1 or train.micro_batch=5", "train.global_batch=8"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved_zb", "train.global_batch=7", "train.micro_batch=1"],
     "train.micro_batch", ["7 micro-batches in 3", "train.global_batch=6 or train.global_batch=8"]),
    (2, ["parallel.pp=2", "parallel.schedule=zbv", "train.compile=true"], "train.compile",
     ["zbv", "train.compile=false"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved_zb", "train.compile=true"], "train.compile",
     ["cannot split", "parallel.schedule=interleaved"]),
    (4096, ["model=8b", "train.global_batch=1024", "train.micro_batch=1", "parallel.tp=16", "parallel.pp=8"],
     "parallel.tp", ["model.kv_heads=8", "parallel.tp=8 parallel.pp=8", "parallel.tp=8 parallel.pp=16"]),
]  # fmt: skip
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


POSSIBLE = [
    (1, []),
    (1, ["parallel.zero=3", "parallel.vpp=1", "train.recompute=every_n"]),
    (2, ["train.micro_batch=4"]),
    (2, ["parallel.tp=2"]),
    (2, ["parallel.pp=2", "train.micro_batch=4"]),
    (2, ["parallel.pp=2", "parallel.schedule=gpipe"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved_zb", "train.global_batch=3", "train.micro_batch=1"]),
    (2, ["parallel.pp=2", "parallel.schedule=zbv"]),
    (2, ["parallel.pp=2", "parallel.schedule=dualpipev", "train.micro_batch=2"]),
    (2, ["parallel.pp=2", "parallel.layers_per_stage=[1,3]", "train.micro_batch=4"]),
    (2, ["parallel.pp=2", "parallel.vpp=2", "parallel.layers_per_stage=[1,1,1,1]"]),
    (2, ["parallel.pp=2", "parallel.schedule=interleaved", "train.compile=true"]),
    (3, ["train.global_batch=9", "train.micro_batch=1"]),
    (3, ["parallel.pp=3", "train.micro_batch=2"]),
    (4, ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=4"]),
    (4, ["parallel.tp=2", "train.micro_batch=4", "parallel.zero=0"]),
    (4, ["parallel.zero=0", "parallel.replicate=4", "train.micro_batch=1"]),
    (4, ["parallel.zero=2", "parallel.replicate=2", "train.micro_batch=1"]),
    (4, ["parallel.pp=4", "parallel.schedule=dualpipev", "train.micro_batch=1", DEEP]),
    (4, ["parallel.pp=4", "parallel.schedule=zbv", DEEP]),
    (4, ["parallel.pp=4", "parallel.schedule=interleaved", "parallel.vpp=2", "train.micro_batch=4", DEEP]),
    (4, ["parallel.pp=2", "parallel.vpp=3", "train.micro_batch=1", DEEP]),
    (5, ["train.global_batch=10", "train.micro_batch=2"]),
    (6, ["parallel.tp=2", "parallel.pp=3", "train.micro_batch=2"]),
    (6, ["parallel.tp=2", "train.global_batch=6", "train.micro_batch=2"]),
    (7, ["train.global_batch=7", "train.micro_batch=1"]),
    (8, ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=2"]),
    (8, ["parallel.tp=2", "parallel.pp=2", "train.micro_batch=1", "parallel.schedule=interleaved_zb"]),
    (8, ["parallel.pp=4", "train.micro_batch=1", "parallel.zero=3"]),
    (8, ["parallel.tp=2", "parallel.pp=4", "train.micro_batch=2"]),
    (4096, ["model=70b", "train.global_batch=1024", "train.micro_batch=1", "parallel.tp=8", "parallel.pp=8"]),
]


@pytest.mark.parametrize(("world", "overrides"), POSSIBLE, ids=[f"{case[0]} {' '.join(case[1])}" for case in POSSIBLE])
def test_a_cut_that_works_is_accepted(world: int, overrides: list[str]) -> None:
    expect_consistent(compose(overrides, world=world), world)


def expect_consistent(config: Config, world: int) -> None:
    """What an accepted configuration promises to those who build from it."""
    parallel, train, model = config.parallel, config.train, config.model
    layout = layout_of(parallel, world)
    assert layout.world == world and (layout.tp, layout.pp) == (parallel.tp, parallel.pp)
    micro_batches, rest = divmod(train.global_batch, train.micro_batch * layout.dp)
    assert rest == 0 and micro_batches > 0
    counts = (model.heads, model.kv_heads, model.ffn, model.vocab_multiple, train.micro_batch * train.seq_len)
    assert [count for count in counts if count % layout.tp] == []
    stages = layout.pp * stages_per_rank(parallel)
    assert sum(parallel.layers_per_stage or split_layers(model.layers, stages, 0.5, 1.5)) == model.layers
    if layout.pp > 1:
        lists = action_lists(schedule_name(parallel), layout.pp, stages_per_rank(parallel), micro_batches)
        assert len(lists) == layout.pp


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


def cut_of(layers: int, global_batch: int, micro_batch: int, **parallel: Any) -> Config:
    """A configuration made without files, for many trials."""
    config = Config()
    return replace(
        config,
        train=replace(config.train, global_batch=global_batch, micro_batch=micro_batch),
        model=replace(config.model, layers=layers),
        parallel=replace(config.parallel, **parallel),
    )


def applied(config: Config, words: tuple[str, ...]) -> Config:
    raw = to_dict(config)
    for word in words:
        key, _, value = word.partition("=")
        section, name = key.split(".")
        raw[section][name] = yaml.safe_load(value)
    return from_dict(raw)


def fitting(pp: int, tp: int, dp: int, micro_batches: int, schedule: str, **settings: Any) -> tuple[Config, int]:
    """A configuration that divides, and its processes: it is left to the pipeline whether it works."""
    micro_batch = settings["micro_batch"]
    schedule = schedule if pp > 1 else "auto"
    whole = micro_batch * dp * micro_batches
    return cut_of(**settings, pp=pp, tp=tp, schedule=schedule, global_batch=whole), pp * tp * dp


small: dict[str, st.SearchStrategy[Any]] = {
    "layers": st.integers(1, 9),
    "micro_batch": st.integers(1, 6),
    "pp": st.integers(1, 4),
    "vpp": st.none() | st.integers(1, 3),
    "schedule": st.sampled_from(["auto", *SCHEDULES]),
    "zero": st.integers(0, 3),
}
anything = st.builds(
    cut_of,
    **small,
    global_batch=st.integers(1, 24),
    tp=st.integers(1, 4),
    replicate=st.integers(1, 4),
    layers_per_stage=st.just(()) | st.lists(st.integers(1, 4), max_size=4).map(tuple),
)
likely = st.builds(fitting, **small, tp=st.integers(1, 2), dp=st.integers(1, 3), micro_batches=st.integers(1, 9))


@settings(max_examples=250, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.tuples(anything, st.integers(1, 8)) | likely)
def test_a_cut_is_refused_with_fixes_that_mend_it_or_is_consistent(cut: tuple[Config, int]) -> None:
    config, world = cut
    problems = layout_problems(config, world)
    if not problems:
        expect_consistent(config, world)
    for problem in problems:
        proposed = proposals(problem.fix, world)
        left = [layout_problems(applied(config, each.words), each.world) for each in proposed]
        assert [str(problem) for faults in left if subject(problem) in map(subject, faults)] == []
        # Of a single fault either every fix is whole, or there is none but those that lead to the next fault.
        assert proposed and (problems[1:] or len({faults == [] for faults in left}) == 1), str(problem)
