"""Hydra's part: the files and overrides merged into one plain mapping, all failures in words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from conf.groups import PRIMARY, Groups, repository_folder
from conf.layers import Layer, dropped, file_layers, override_layer
from conf.overrides import Accepted, quoted
from conf.problem import Problem, show
from conf.schema import Config
from conf.suggest import likely_keys
from conf.tree import leaves

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Merged:
    """What all layers say together."""

    content: Mapping[str, Any]
    """Plain values, interpolations resolved; keys that nobody set have their defaults."""
    layers: tuple[Layer, ...]
    """Where the values came from, in the order of merging."""
    problems: tuple[Problem, ...]
    """Interpolations that lead nowhere, and settings that would vanish."""
    complete: bool = True
    """Whether Hydra merged everything; if not, the content is that of the overrides alone."""


def merge(accepted: Sequence[Accepted], groups: Groups) -> Merged:
    """The files and the accepted overrides as one mapping; where Hydra fails, the overrides alone."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    top = override_layer(accepted)
    try:
        composed, layers = _hydra(accepted, groups)
        loser = dropped([*layers, top], "train.steps", "train.tokens")
        merged = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(Config())), composed)
        if loser is not None:
            OmegaConf.update(merged, loser, None, force_add=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, TypeError) as error:
        return Merged(top.content, (top,), tuple(_failures(error, groups)), complete=False)
    problems = [*_vanishing(layers), *_missing(composed)]
    content = _plain(merged, "", problems)
    return Merged(content, (*layers, top), tuple(problems))


def _hydra(accepted: Sequence[Accepted], groups: Groups) -> tuple[DictConfig, list[Layer]]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    overrides = [each.text for each in accepted]
    if len(groups.folders) > 1:
        places = ",".join(quoted(f"file://{folder}") for folder in groups.folders[1:])
        overrides.append(f"hydra.searchpath=[{places}]")
    with initialize_config_dir(str(repository_folder()), version_base="1.3"):
        composed = compose(PRIMARY, overrides)
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(PRIMARY, overrides, RunMode.RUN).defaults
    return composed, file_layers(defaults, groups)


def _vanishing(layers: Sequence[Layer]) -> list[Problem]:
    rule = "Hydra's own settings are not used here: it writes no files and starts no jobs"
    return [
        Problem("hydra", None, rule, "remove it from the file", source=layer.source)
        for layer in layers
        if "hydra" in layer.content
    ]


def _missing(composed: DictConfig) -> list[Problem]:
    """Keys left at ???; once the defaults fill in, they could no longer be told."""
    from omegaconf import OmegaConf

    rule = "??? marks a value that must be given"
    unresolved = OmegaConf.to_container(composed, resolve=False)
    return [Problem(key, "???", rule, f"write {key}=VALUE") for key in _marked(unresolved, "")]


def _marked(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, item in node.items():
            yield from _marked(item, f"{key}.{name!s}".lstrip("."))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _marked(item, f"{key}[{index}]")
    elif node == "???":
        yield key


def _plain(node: Any, key: str, problems: list[Problem]) -> Any:
    """A node of OmegaConf as plain containers; what cannot be resolved is left out and reported."""
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    def child(name: Any, below: str) -> Iterator[tuple[Any, Any]]:
        try:
            yield name, _plain(node[name], below, problems)
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(_unresolved(below, node, name, error))

    if isinstance(node, DictConfig):
        if node._is_none():
            return None
        return dict(pair for name in node for pair in child(name, f"{key}.{name!s}".lstrip(".")))
    if isinstance(node, ListConfig):
        return [pair[1] for index in range(len(node)) for pair in child(index, f"{key}[{index}]")]
    return node


def _unresolved(key: str, node: Any, name: Any, error: Exception) -> Problem:
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(node, resolve=False)
    written = show(raw[name])
    detail = _first_line(error)
    missing = re.search(r"Environment variable '([^']+)' not found", str(error))
    if missing:
        variable = missing[1]
        fix = f"export {variable}=VALUE, or give a default: ${{oc.env:{variable},DEFAULT}}"
        return Problem(key, written, f"the environment variable {variable} is not set", fix)
    named = re.search(r"Interpolation key '([^']+)' not found", str(error))
    likely = likely_keys(named[1], leaves()) if named else []
    fix = f"write ${{{likely[0]}}}" if likely else "name a key that exists, in full, such as ${train.steps}"
    return Problem(key, written, f"the interpolation leads nowhere: {detail}", fix)


def _first_line(error: BaseException) -> str:
    """The innermost cause's first line: Hydra wraps what happened in what it was doing."""
    cause: BaseException = error
    while cause.__cause__ is not None and str(cause.__cause__):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def _failures(error: Exception, groups: Groups) -> list[Problem]:
    """What stopped Hydra, in words; with unreadable YAML, every unreadable file."""
    from hydra.errors import MissingConfigException

    unreadable = [problem for folder in groups.folders for problem in _unreadable(folder)]
    if unreadable:
        return unreadable
    text = " ".join(re.split(r"(?:Config s|S)earch path:", str(error))[0].split())
    inner = _first_line(error)
    rule = text if inner in text else f"{text}: {inner}".strip(": ")
    if isinstance(error, MissingConfigException):
        return [Problem("defaults", error.missing_cfg_file, rule, "name a file that exists in the defaults list")]
    if "DictConfig with ListConfig" in rule:
        rule = "an item of data.sources is set, but nothing gives the list itself"
        return [Problem("data.sources", None, rule, "write 'data.sources=[{name: web, prefix: PATH}]'")]
    if "list index out of range" in rule:
        rule = f"{rule}: the list has fewer items (they are counted from 0)"
        return [
            Problem("composition", None, rule, "write the whole list, such as 'data.sources=[{name: a, prefix: p}]'")
        ]
    return [Problem("composition", None, rule, "mend the file or the override that it names")]


def _unreadable(folder: Path) -> Iterator[Problem]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for path in sorted(folder.rglob("*.yaml")):
        try:
            loaded = OmegaConf.load(path)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
            what = " ".join(f"{error.context or ''} {error.problem or ''}".split())
            yield Problem(str(path), None, f"unreadable YAML at {where}: {what}", "mend that line")
        except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
            yield Problem(str(path), None, f"unreadable YAML: {_first_line(error)}", "mend the file")
        else:
            if not isinstance(loaded, DictConfig):
                yield Problem(str(path), None, "the file holds no mapping of keys", "write key: value lines")
