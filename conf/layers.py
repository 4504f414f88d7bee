"""What Hydra merged: the files in their order, and which of them said what."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from conf.groups import Groups
from conf.overrides import Accepted
from conf.problem import Problem

COMMAND_LINE = ""


@dataclass(frozen=True)
class Layer:
    """One file's settings, or one override, in the order of merging."""

    source: str
    """The file's path; empty for the command line."""
    content: Mapping[str, Any]
    """Nested settings, below their package."""


def nest(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {a: {b: value}}."""
    for part in reversed([part for part in key.split(".") if part]):
        value = {part: value}
    return value if isinstance(value, dict) else {}


def file_layers(defaults: Iterable[Any], groups: Groups) -> list[Layer]:
    """The files of a defaults list, Hydra's own left out."""
    layers = []
    for default in defaults:
        path = groups.file(default.config_path) if default.config_path else None
        if path is not None:
            content = dict(_content(path))
            content.pop("defaults", None)
            layers.append(Layer(_shown(path), nest(default.package or "", content)))
    return layers


def _content(path: Path) -> Mapping[str, Any]:
    """A file as YAML that Hydra has read already; interpolations stay as they stand."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def override_layer(accepted: Iterable[Accepted]) -> Layer:
    """The overrides of keys: one layer, above all files."""
    merged: dict[str, Any] = {}
    for each in accepted:
        if not each.is_group and not each.text.startswith("~") and not re.search(r"\.\d+\.", each.key):
            _merge(merged, nest(each.key, each.value))
    return Layer(COMMAND_LINE, merged)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        below = into.get(key)
        if isinstance(value, Mapping):
            into[key] = dict(below) if isinstance(below, Mapping) else {}
            _merge(into[key], value)
        else:
            into[key] = value


def find(content: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Whether a nested mapping has a dotted key, and its value."""
    node: Any = content
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False, None
        node = node[part]
    return True, node


def origin(layers: Sequence[Layer], key: str) -> str:
    """The last layer that set a key, or what it stands in."""
    key = key.split("[", 1)[0]
    while key:
        for layer in reversed(layers):
            if find(layer.content, key)[0]:
                return layer.source
        key = key.rpartition(".")[0]
    return COMMAND_LINE


def located(problems: Iterable[Problem], layers: Sequence[Layer]) -> list[Problem]:
    """The problems, each with the file it came from."""
    return [each if each.source else replace(each, source=origin(layers, each.key)) for each in problems]


def dropped(layers: Iterable[Layer], one: str, other: str) -> str | None:
    """Of two keys that exclude each other, the one that a later layer's setting of its rival replaces."""
    loser: str | None = None
    for layer in layers:
        has_one, has_other = (find(layer.content, key)[1] is not None for key in (one, other))
        if has_one or has_other:
            loser = None if has_one and has_other else other if has_one else one
    return loser
