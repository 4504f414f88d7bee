"""Plain values become exactly the types of the schema, or a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.convert import FAILED, convert, from_dict, read
from conf.problem import Problem
from conf.resolve import to_dict, to_yaml
from conf.schema import Config
from conf.tree import element, is_section, optional, own_leaves
from errors import ConfigRefused


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    share: float = 0.5


def tried(kind: Any, value: object) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    return convert(kind, value, "a.key", problems), problems


ACCEPTED = [
    (int, 3, 3), (int, -10**20, -(10**20)), (float, 3, 3.0), (float, 2.5, 2.5), (float, "1e-4", 1e-4),
    (bool, False, False), (str, "", ""), (int | None, None, None), (int | None, 4, 4),
    (Literal["a", "b"], "b", "b"), (tuple[str, ...], ["x", "y"], ("x", "y")), (tuple[str, ...], (), ()),
    (Inner, {"name": "n"}, Inner("n")), (Inner | None, None, None),
    (tuple[Inner, ...], [{"name": "n", "share": 1}], (Inner("n", 1.0),)),
    (dict[str, Any], {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
]  # fmt: skip
REFUSED = [
    (int, True), (int, 2.5), (int, "2.5e0"), (int, "3"), (int, None), (float, True), (float, "0.1"), (float, "fast"),
    (float, float("nan")), (float, float("inf")), (float, 10**400), (float, "1e999"), (bool, 1),
    (bool, "true"), (str, 1), (str, None), (str, True), (Literal["a", "b"], "c"),
    (Literal["a", "b"], None), (Literal[1, 2], True),
    (tuple[str, ...], "abc"), (tuple[str, ...], [1]), (tuple[str, ...], None), (Inner, {}), (Inner, "x"),
    (Inner, {"name": "n", "more": 1}), (Inner, {"name": 1}), (tuple[Inner, ...], [{"share": 1}]),
    (dict[str, Any], [1]), (dict[str, Any], {1: 2}), (dict[str, Any], {"a": float("nan")}),
    (dict[str, Any], {"a": object()}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "expected"), ACCEPTED)
def test_a_value_of_the_type_is_taken_as_that_type(kind: Any, value: object, expected: object) -> None:
    result, problems = tried(kind, value)
    assert problems == []
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_a_value_of_another_type_is_refused_with_its_key(kind: Any, value: object) -> None:
    _, problems = tried(kind, value)
    assert len(problems) == 1
    assert problems[0].key.startswith("a.key")
    assert problems[0].rule and problems[0].fix


def test_every_mistake_of_a_tree_is_collected_and_the_rest_kept() -> None:
    config, problems = read({"train": {"steps": "x", "seq_len": 64, "zz": 1}, "optim": {"lr": "y"}, "run": 3})
    assert {each.key for each in problems} == {"train.steps", "train.zz", "optim.lr", "run"}
    assert config.train.seq_len == 64


def test_the_converted_tree_holds_no_lists() -> None:
    config = from_dict({"metrics": {"wandb_tags": ["a"]}, "data": {"sources": [{"name": "a", "prefix": "p"}]}})
    assert isinstance(config.metrics.wandb_tags, tuple) and isinstance(config.data.sources, tuple)


def test_from_dict_refuses_as_compose_does() -> None:
    with pytest.raises(ConfigRefused, match=r"did you mean `train\.steps`"):
        from_dict({"train": {"stpes": 3}})
    with pytest.raises(ConfigRefused, match="section"):
        from_dict([])  # type: ignore[arg-type]


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the schema."""
    inner, nullable = optional(kind)
    simple: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
        int: st.integers,
        float: lambda: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans,
        str: lambda: (
            st.text(st.characters(codec="utf-8")) | st.sampled_from(["1e-4", "1_0", "null", "yes", "${a}", "3"])
        ),
    }
    if inner in simple:
        found = simple[inner]()
    elif is_section(inner):
        found = st.builds(inner, **{leaf.key: strategy(leaf.kind) for leaf in own_leaves(inner)})
    elif element(inner) is not None:
        found = st.lists(strategy(element(inner)), max_size=2).map(tuple)
    elif hasattr(inner, "__args__") and inner.__origin__ is Literal:
        found = st.sampled_from(inner.__args__)
    elif inner.__args__[1] is float:
        found = st.dictionaries(st.text("abc.:", max_size=4), strategy(float))
    else:
        found = st.dictionaries(st.text("abc.:", max_size=4), st.none() | st.booleans() | st.integers() | st.text())
    return st.none() | found if nullable else found


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(strategy(Config))
def test_every_config_survives_the_way_through_yaml_and_back(config: Config) -> None:
    assert from_dict(to_dict(config)) == config
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), below, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.sampled_from([leaf.key for leaf in own_leaves(Config)]), plain, st.booleans())
def test_whatever_stands_in_a_section_gives_a_config_and_problems_but_never_another_error(
    section: str, value: object, below: bool
) -> None:
    first = own_leaves(type(getattr(Config(), section)))[0].key if section != "extra" else "x"
    config, problems = read({section: {first: value} if below else value})
    assert isinstance(config, Config)
    assert all(str(each) for each in problems)
    assert FAILED not in vars(config).values()


@pytest.mark.parametrize("written", [2e3, "2e3", 2000.0, 2000])
def test_a_whole_number_may_be_written_with_an_exponent(written: object) -> None:
    """As budgets of tokens are: 2e12."""
    steps = from_dict({"train": {"steps": written}}).train.steps
    assert steps == 2000 and type(steps) is int
