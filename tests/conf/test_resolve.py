"""What follows from a configuration: length, name, place, written form, changes on resuming."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from conf.compose import compose
from conf.convert import from_dict
from conf.resolve import (
    FREE,
    changes,
    differing,
    flatten,
    is_free,
    run_directory,
    run_name,
    to_dict,
    to_yaml,
    total_steps,
)
from conf.schema import Config
from conf.tree import element, is_section, leaves, optional, own_leaves

LEAVES = {key: leaf for key, leaf in leaves().items() if key != "extra"}
OPTIONAL = ("model.rope_scaling", "model.moe")


def varied(key: str) -> Any:
    """A value that differs from the default."""
    leaf = LEAVES[key]
    kind = optional(leaf.kind)[0]
    if kind is bool:
        return not leaf.default
    if kind in (int, float):
        return (leaf.default or 0) + 1
    if kind is str:
        return "another"
    if element(kind) is str:
        return ["x"]
    if element(kind) is int:
        return [1]
    if key == "debug.inject":
        return [{"kind": "kill", "step": 5}]
    if element(kind) is not None and is_section(element(kind)) and key != "data.sources":
        return [{leaf.key: 5 for leaf in own_leaves(element(kind)) if leaf.kind is int}]
    if key == "data.sources":
        return [{"name": "a", "prefix": "p"}]
    if key in OPTIONAL:
        return {}
    return next((choice for choice in get_args(kind) if choice != leaf.default), None)


def with_value(key: str, value: Any) -> Config:
    raw = to_dict(Config())
    for section in OPTIONAL:
        raw["model"][section.split(".")[1]] = {} if key.startswith(section + ".") else None
    node = raw
    *above, name = key.split(".")
    for part in above:
        node = node[part]
    node[name] = value
    return from_dict(raw)


@pytest.mark.parametrize("key", [key for key in LEAVES if varied(key) is not None])
def test_a_derived_name_changes_with_the_training_and_with_nothing_else(key: str) -> None:
    default = LEAVES[key].default
    before, after = with_value(key, default), with_value(key, varied(key))
    assert before != after
    if key == "run.name":
        return
    assert (run_name(before)[-8:] == run_name(after)[-8:]) == is_free(key)


def test_the_keys_that_are_not_varied_have_one_value_only() -> None:
    assert {key for key in LEAVES if varied(key) is None} == {"optim.name"}


def test_every_free_pattern_names_a_key_and_notes_are_free() -> None:
    known = [*LEAVES, "extra.note"]
    assert [pattern for pattern in FREE if not any(fnmatchcase(key, pattern) for key in known)] == []
    assert run_name(compose(["+extra.a=1"])) == run_name(compose([]))


def test_a_derived_name_holds_the_model_the_data_and_eight_hex_digits() -> None:
    model, data, digits = run_name(compose(["model=125m"])).rsplit("-", 2)
    assert (model, data, len(digits)) == ("125m", "stdlib", 8)
    assert int(digits, 16) >= 0


def test_a_given_name_is_the_runs_and_its_folders() -> None:
    config = compose(["run.name=mine", "run.dir=somewhere"])
    assert run_name(config) == "mine"
    assert run_directory(config) == Path("somewhere/mine")


def test_tokens_are_rounded_down_to_whole_steps() -> None:
    assert total_steps(compose(["train.tokens=204800"])) == 100
    assert total_steps(compose(["train.tokens=206847"])) == 100
    assert total_steps(compose(["train.steps=70"])) == 70


def test_flattened_keys_are_the_schemas_keys() -> None:
    below = {key for key in LEAVES if key.rpartition(".")[0] in OPTIONAL}
    assert set(flatten(Config())) == set(LEAVES) - below
    assert flatten(compose(["+extra.a={b: 1}"]))["extra.a"] == {"b": 1}


def test_yaml_text_that_hydra_would_read_as_a_number_is_quoted() -> None:
    config = dataclasses.replace(Config(), extra={"a": "1e-4", "b": "12", "c": "word"})
    assert "a: '1e-4'" in to_yaml(config) and "b: '12'" in to_yaml(config) and "c: word" in to_yaml(config)


def test_the_yaml_is_an_experiment_that_composes_to_the_same_config(tmp_path: Path) -> None:
    config = compose(
        [
            "model=8b",
            "model.moe.experts=4",
            "optim.lr=1e-5",
            "train.tokens=500000",
            "run.name=007",
            "metrics.wandb_tags=[x]",
        ]
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "again.yaml").write_text("# @package _global_\n" + to_yaml(config))
    assert compose(["experiment=again"], str(tmp_path)) == config


def test_changes_tells_what_may_change_from_what_may_not() -> None:
    old = yaml.safe_load(to_yaml(compose([])))
    free, refused = changes(old, compose(["train.micro_batch=4", "optim.lr=1", "+extra.a=1", "model.rope_scaling={}"]))
    assert {each.key for each in free} == {"train.micro_batch", "extra.a"}
    assert {each.key for each in refused} == {"optim.lr", "model.rope_scaling"}
    assert str(next(each for each in refused if each.key == "optim.lr")) == "optim.lr: null -> 1.0"


def test_the_same_config_has_no_changes() -> None:
    config = compose(["model=8b", "metrics.wandb_tags=[a]", "data=indexed", "data.sources=[{name: a, prefix: p}]"])
    assert changes(yaml.safe_load(to_yaml(config)), config) == ([], [])


def test_the_cut_and_what_is_recomputed_may_change_and_leave_the_name_alone() -> None:
    before = compose(["model=moe_nano", "train.micro_batch=2"])
    cut = [
        "parallel.tp=2", "parallel.pp=2", "parallel.cp=2", "parallel.cp_exchange=all_gather", "parallel.ep=2",
        "parallel.zero=3", "train.recompute=full", "train.recompute_n=3",
    ]  # fmt: skip
    after = compose(["model=moe_nano", "train.micro_batch=2", *cut], world=8)
    free, refused = changes(to_dict(before), after)
    assert {each.key for each in free} == {override.split("=")[0] for override in cut}
    assert refused == [] and run_name(before) == run_name(after)


def test_changes_below_an_optional_section_are_told_key_by_key() -> None:
    old = to_dict(compose(["model=moe_nano"]))
    del old["model"]["moe"]["z_loss"]
    free, refused = changes(old, compose(["model=moe_nano", "model.moe.bias_rate=2e-3", "model.moe.top_k=2"]))
    assert (free, [str(each) for each in refused]) == (
        [], ["model.moe.top_k: 4 -> 2", "model.moe.bias_rate: 0.001 -> 0.002"],
    )  # fmt: skip
    assert changes(old, compose(["model=moe_nano"])) == ([], [])
    assert [each.key for each in changes(old, compose(["model=moe_nano", "model.moe=null"]))[1]] == ["model.moe"]
    assert differing(old, to_dict(compose(["model=moe_nano", "model.moe.every=2"]))) == ["model.moe.every"]


@pytest.mark.parametrize("allowed", ["model.moe", "model.moe.*", "model.moe.bias_rate"])
def test_a_key_of_an_optional_section_may_be_allowed_alone_or_with_the_section(allowed: str) -> None:
    old = to_dict(compose(["model=moe_nano"]))
    new = compose(["model=moe_nano", "model.moe.bias_rate=0", f"checkpoint.allow=[{allowed}]"])
    assert changes(old, new)[1] == []


def test_a_key_named_in_checkpoint_allow_may_change() -> None:
    old = to_dict(compose([]))
    free, refused = changes(old, compose(["optim.lr=1", "optim.clip=2", "checkpoint.allow=[optim.lr]"]))
    assert "optim.lr" in {each.key for each in free}
    assert [each.key for each in refused] == ["optim.clip"]


def test_a_key_that_only_one_version_knows_is_seen_unless_it_has_its_default() -> None:
    old = to_dict(compose([]))
    old["optim"]["forgotten"] = 3
    del old["optim"]["clip"]
    assert [each.key for each in changes(old, compose([]))[1]] == ["optim.forgotten"]
    assert {each.key for each in changes(old, compose(["optim.clip=2"]))[1]} == {
        "optim.forgotten",
        "optim.clip",
    }
