"""What follows from a configuration: its length, name, place, written forms, and what a resume changes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from conf.problem import show
from conf.schema import Config
from conf.tree import is_section, leaves, optional, own_leaves
from data.ramp import Ramp

FREE = (
    "run.name",
    "run.dir",
    "train.stop_at",
    "train.micro_batch",
    "train.skip_steps",
    "train.compile",
    "train.recompute",
    "train.recompute_n",
    "train.device",
    "train.threads",
    "train.gc_every",
    "train.max_hours",
    "train.eval_every",
    "train.eval_samples",
    "model.loss_chunk",
    "data.cache",
    "data.max_epochs",
    "data.prefetch",
    "data.workers",
    "parallel.*",
    "precision.fp8.backend",
    "precision.fp8.health_every",
    "checkpoint.*",
    "metrics.*",
    "health.*",
    "debug.*",
    "extra.*",
)
"""Keys that never change the training, so that a resumed run may change them; a star stands for the rest."""
_ABSENT = "(not there)"
_UNFOLDED = 10**6


@dataclass(frozen=True)
class Change:
    """A key whose value differs between a saved run and a new command."""

    key: str
    """Dotted key."""
    old: Any
    """What the saved run has."""
    new: Any
    """What the new command says."""

    def __str__(self) -> str:
        return f"{self.key}: {show(_told(self.old), None)} -> {show(_told(self.new), None)}"


def _told(value: Any) -> Any:
    """A value without the keys of its items that nobody set."""
    if isinstance(value, list):
        return [_told(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items() if item is not None}
    return value


def total_steps(config: Config) -> int:
    """Optimizer steps of the whole run; tokens are rounded down to whole steps."""
    if config.train.steps is not None:
        return config.train.steps
    return ramp_of(config).steps_within((config.train.tokens or 0) // config.train.seq_len)


def ramp_of(config: Config) -> Ramp:
    """The sizes of the run's steps."""
    return Ramp(config.train.global_batch, config.train.batch_ramp, config.train.seq_len)


def run_name(config: Config) -> str:
    """The given name, or model, data and 8 hex digits of the training configuration."""
    data = config.data.name or "+".join(source.name for source in config.data.sources)[:40]
    return config.run.name or f"{config.model.name}-{data}-{training_hash(config)[:8]}"


def run_directory(config: Config) -> Path:
    """The folder of the run; it need not exist."""
    return Path(config.run.dir).expanduser() / run_name(config)


def training_hash(config: Config) -> str:
    """SHA-256 in hex over every key that decides the training: all but the FREE ones."""
    deciding = {key: value for key, value in flatten(config).items() if not is_free(key)}
    text = json.dumps(deciding, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def is_free(key: str, allowed: tuple[str, ...] = ()) -> bool:
    """Whether a key, or the mapping that it stands in, may change when a run goes on."""
    return any(fnmatchcase(key, each) or key.startswith(f"{each}.") for each in (*FREE, *allowed))


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, as a saved config.yaml holds them."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(config))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key to plain value; lists and optional mappings stay whole."""
    return _keys(to_dict(config))


def _keys(nested: Mapping[str, Any]) -> dict[str, Any]:
    return _flat(nested, "", leaves())


def _flat(nested: Mapping[str, Any], prefix: str, known: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        key = prefix + name
        if isinstance(value, Mapping) and (key == "extra" or (key not in known and prefix != "extra.")):
            flat |= _flat(value, key + ".", known)
        else:
            flat[key] = value
    return flat


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that both PyYAML and Hydra read back to the same values."""
    dumped: str = yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_UNFOLDED)
    return dumped


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader could take for something else: 1e-4 (Hydra's is a number), odd characters."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    odd = not value.isprintable() or value != value.strip()
    numeric = re.fullmatch(r"[-+]?[\d_]*\.?[\d_]*([eE][-+]?\d+)?", value)
    style = '"' if odd else "'" if numeric else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between two saved configurations."""
    return [change.key for change in _differences(_keys(one), _keys(other))]


def changes(old: Mapping[str, Any], new: Config) -> tuple[list[Change], list[Change]]:
    """What differs from a saved config.yaml's mapping: what may, and what may not.

    A key that the saved run lacks had its default; one that this version does not know counts as a change.
    """
    found = _differences(flatten(Config()) | _keys(old), flatten(new))
    free = [each for each in found if is_free(each.key, new.checkpoint.allow)]
    return free, [each for each in found if each not in free]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Keys whose values differ, in the new one's order; of an optional section that both have, its keys."""
    found: list[Change] = []
    for key in dict.fromkeys([*new, *old]):
        change = Change(key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        below = isinstance(change.old, Mapping) and isinstance(change.new, Mapping) and _defaults_below(key)
        if below:
            found += _differences(_below(key, below | change.old), _below(key, below | change.new))
        elif change.old != change.new:
            found.append(change)
    return found


def _below(key: str, section: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}.{name}": value for name, value in section.items()}


def _defaults_below(key: str) -> dict[str, Any]:
    """What the keys of an optional section have by default; nothing for other keys."""
    kind: Any = optional(leaves()[key].kind)[0] if key in leaves() else None
    return {leaf.key: leaf.default for leaf in own_leaves(kind)} if is_section(kind) else {}
