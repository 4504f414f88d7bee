"""Plain containers to the frozen dataclasses of the schema, with every mistake collected."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args, get_origin

from conf.problem import Problem, assign, refuse, show
from conf.schema import Config
from conf.suggest import did_you_mean, unknown_key
from conf.tree import element, is_section, leaves, optional, own_leaves, sample, words


class _Failed:
    """Stands where a value could not be converted."""


FAILED: Final = _Failed()
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
_SCALED = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGbBtT])")
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_YES, _NO, _NULL = {"yes", "on", "1", "y"}, {"no", "off", "0", "n"}, {"none", "nil", "~", "nan"}


def from_dict(raw: Mapping[str, Any]) -> Config:
    """A Config from a saved config.yaml's mapping; keys it lacks take their defaults."""
    config, problems = read(raw)
    refuse(problems)
    return config


def read(raw: object) -> tuple[Config, list[Problem]]:
    """A Config and all that is wrong with its source; a wrong value leaves the default in its place."""
    problems: list[Problem] = []
    config = convert(Config, raw, "", problems)
    return (config if isinstance(config, Config) else Config()), problems


def convert(kind: Any, value: object, key: str, problems: list[Problem]) -> Any:
    """One value as its type; on a mistake, reports it and returns FAILED."""
    inner, nullable = optional(kind)
    if value is None and nullable:
        return None
    if is_section(inner):
        return _section(inner, value, key, problems)
    if element(inner) is not None:
        return _list(inner, value, key, problems)
    if get_origin(inner) is Literal:
        return _choice(kind, value, key, problems)
    if get_origin(inner) is dict:
        named = get_args(inner)[1]
        return _notes(value, key, problems) if named is Any else _named(named, value, key, problems)
    accepted = _SCALARS[inner](value)
    if accepted is FAILED:
        problems.append(_wrong_type(kind, value, key))
    return accepted


def _section(owner: type, value: object, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        fix = f"set its keys one by one, for example {_example_below(owner, key)}, or remove the line"
        rule = f"`{key}` is a section, not a single value"
        problems.append(Problem(key or "the file", show(value), rule, fix))
        return FAILED
    prefix = f"{key}." if key else ""
    declared = {leaf.key: leaf for leaf in own_leaves(owner)}
    for name in value:
        if name not in declared:
            problems.append(_unknown(owner, f"{prefix}{name}", value[name]))
    given: dict[str, Any] = {}
    complete = True
    for name, leaf in declared.items():
        if name in value:
            given[name] = convert(leaf.kind, value[name], prefix + name, problems)
        elif leaf.default is dataclasses.MISSING:
            rule = f"`{prefix}{name}` must be given: {words(leaf.kind)}"
            problems.append(Problem(prefix + name, None, rule, f"write {name}: {show(sample(leaf.kind))}"))
            complete = False
        complete &= given.get(name) is not FAILED or leaf.default is not dataclasses.MISSING
    return owner(**{name: item for name, item in given.items() if item is not FAILED}) if complete else FAILED


def _unknown(owner: type, key: str, value: object) -> Problem:
    if "[" not in key:
        return unknown_key(key, show(value), leaves())
    names = [f.name for f in dataclasses.fields(owner)]
    hint = did_you_mean(key.rsplit(".", 1)[-1], names)
    rule = f"unknown key `{key}`; {hint}".rstrip("; ")
    return Problem(key, show(value), rule, f"its keys: {', '.join(names)}")


def _example_below(owner: type, key: str) -> str:
    prefix = f"{key}." if key else ""
    first = own_leaves(owner)[0]
    return assign(f"{prefix}{first.key}", sample(first.kind, first.default))


def _list(kind: Any, value: object, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, (list, tuple)):
        problems.append(_wrong_type(kind, value, key))
        return FAILED
    items = [convert(element(kind), item, f"{key}[{index}]", problems) for index, item in enumerate(value)]
    return FAILED if any(item is FAILED for item in items) else tuple(items)


def _choice(kind: Any, value: object, key: str, problems: list[Problem]) -> Any:
    choices = get_args(optional(kind)[0])
    if isinstance(value, float) and value != value:
        value = "nan"  # the word, which YAML takes for the number
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    hint = did_you_mean(str(value), [str(choice) for choice in choices])
    fix = f"write {key}={hint[len('did you mean ') : -1] if hint else show(choices[0])}"
    problems.append(Problem(key, show(value), f"must be {words(kind)}" + (f"; {hint}" if hint else ""), fix))
    return FAILED


def _named(kind: Any, value: object, key: str, problems: list[Problem]) -> Any:
    """Names of the user's own, each with a value of one type."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        rule = f"must be names, each with {words(kind)}"
        problems.append(Problem(key, show(value), rule, f"write {{NAME: {show(sample(kind))}}}"))
        return FAILED
    items = {name: convert(kind, item, f"{key}.{name}", problems) for name, item in value.items()}
    return FAILED if any(item is FAILED for item in items.values()) else items


def _notes(value: object, key: str, problems: list[Problem]) -> Any:
    """Free notes: whatever YAML and JSON can both hold."""
    if not isinstance(value, Mapping):
        rule = "must be a mapping of your own keys"
        problems.append(Problem(key, show(value), rule, f"write +{key}.NAME=VALUE"))
        return FAILED
    before = len(problems)
    copied = _note(value, key, problems)
    return copied if len(problems) == before else FAILED


def _note(value: object, key: str, problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                rule = f"the keys below `{key}` must be text"
                problems.append(Problem(f"{key}.{name}", None, rule, f'quote it: "{name}"'))
        return {str(name): _note(item, f"{key}.{name}", problems) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_note(item, f"{key}[{index}]", problems) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(Problem(key, show(value), "must be a finite number", "write it as text, in quotes"))
    elif not isinstance(value, (str, int, float, bool, type(None))):
        rule = f"a {type(value).__name__} cannot be recorded"
        problems.append(Problem(key, show(value), rule, "write it as text, in quotes"))
    return value


def _as_bool(value: object) -> Any:
    return value if isinstance(value, bool) else FAILED


def _as_int(value: object) -> Any:
    """A whole number, also as 2e12 or 100.0; PyYAML reads a bare 2e12 as text."""
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else FAILED


def _as_str(value: object) -> Any:
    return value if isinstance(value, str) else FAILED


def _as_float(value: object) -> Any:
    """A finite float; PyYAML reads a bare 1e-4 as text, so text with an exponent counts."""
    if isinstance(value, str):
        number = float(value) if _EXPONENT.fullmatch(value) else math.nan
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e308 or isinstance(value, float) else math.inf
    else:
        return FAILED
    return number if math.isfinite(number) else FAILED


_SCALARS: Mapping[Any, Callable[[object], Any]] = {
    bool: _as_bool,
    int: _as_int,
    float: _as_float,
    str: _as_str,
}


def _wrong_type(kind: Any, value: object, key: str) -> Problem:
    inner, nullable = optional(kind)
    repaired = _repaired(inner, value, nullable)
    default = leaves()[key].default if key in leaves() else None
    suggestion = assign(key, sample(kind, default)) if repaired is None else f"{key}={repaired}"
    given = "" if repaired is None else f" ({_name_of(value)} was given)"
    return Problem(key, show(value), f"must be {words(kind)}{given}", f"write, for example, {suggestion}")


def _name_of(value: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number with a fraction", str: "text"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _repaired(kind: Any, value: object, nullable: bool) -> str | None:
    """The value as it was probably meant, as it should be written."""
    text = str(value).strip().lower()
    if nullable and isinstance(value, str) and text in _NULL:
        return "null"
    if kind is bool and (text in _YES or text in _NO):
        return str(text in _YES).lower()
    if kind is str and isinstance(value, (bool, int, float)):
        return f"'{show(value)}' (quoted)"
    if kind in (int, float) and not isinstance(value, bool):
        return _number(kind, text)
    return None


def _number(kind: Any, text: str) -> str | None:
    scaled = _SCALED.fullmatch(text)
    try:
        number = float(scaled[1]) * _SCALES[scaled[2]] if scaled else float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        return None
    return str(int(number)) if kind is int else repr(number)
