"""The text of --help: flags, groups, and every key with its type, default and one-line doc."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from conf.flags import FLAGS, Flag
from conf.groups import Groups, plain_settings, read_groups
from conf.layers import find
from conf.problem import show
from conf.schema import Config
from conf.tree import Leaf, element, field_docs, is_section, optional, own_leaves, short

_WIDTH = 100
_INDENT = 2
_COLUMN = 44
"""Where the docs begin."""
_EXAMPLES = (
    ("{program}", "a small model on the standard library's sources: minutes on a laptop"),
    ("{program} experiment=quick", "is everything in place? half a minute"),
    ("{program} model=125m precision=bf16 train.steps=2000 optim.lr=6.0e-4", "change what you need"),
    (
        "{program} data=indexed 'data.sources=[{{name: web, prefix: /data/web}}]' train.steps=10000",
        "your corpus",
    ),
    (
        "torchrun --nproc-per-node 4 {script} parallel.tp=2 train.micro_batch=4",
        "the same training over four processes; what tp, pp and cp leave of them is data parallelism",
    ),
    ("{program} -m optim.lr=1.0e-3,3.0e-4 model.layers=4,8", "four runs, one after another"),
)


def help_text(program: str = "train.py", config_dir: str | None = None, flags: Sequence[Flag] = FLAGS) -> str:
    """The whole text, laid out for 100 columns."""
    parts = [
        f"usage: {_command(program)} [key=value ...] [group=choice ...] [flags]",
        _block("Flags", _flags(flags)),
        _block(
            "Groups: one file each, chosen as group=choice (* is what you get)",
            _groups(read_groups(config_dir)),
        ),
        _block("Keys: set as key=value; shown are what a plain run has, the type, and the meaning", _keys()),
        _block("Examples", _examples(program)),
    ]
    return "\n\n".join(parts) + "\n"


def _command(program: str) -> str:
    return f"python {program}"


def _block(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *lines])


def _row(left: str, doc: str) -> Iterator[str]:
    """Two columns, the right one wrapped; a long left side takes a line of its own."""
    lines = textwrap.wrap(doc, _WIDTH - _COLUMN, break_long_words=False, break_on_hyphens=False) or [""]
    left = " " * _INDENT + left
    if len(left) > _COLUMN - 2:
        yield left
        left = ""
    yield f"{left:<{_COLUMN}}{lines[0]}".rstrip()
    for line in lines[1:]:
        yield " " * _COLUMN + line


def _flags(flags: Sequence[Flag]) -> Iterator[str]:
    for flag in flags:
        yield from _row(", ".join(flag.names) + (f" {flag.argument}" if flag.argument else ""), flag.doc)


def _groups(groups: Groups) -> Iterator[str]:
    for group, choices in groups.choices.items():
        marked = [f"{choice}*" if choice == groups.chosen.get(group) else choice for choice in choices]
        yield from _row(f"{group}=" if group in groups.chosen else f"+{group}=", "  ".join(marked))


def _keys() -> Iterator[str]:
    docs, plain = field_docs(Config), plain_settings()
    for leaf in own_leaves(Config):
        yield ""
        yield f" {leaf.key}: {docs.get(leaf.key, '')}".rstrip()
        if is_section(leaf.kind):
            yield from _section(leaf.kind, leaf.key + ".", plain)


def _section(owner: type, prefix: str, plain: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    docs = field_docs(owner)
    for leaf in own_leaves(owner, prefix):
        inner, doc = optional(leaf.kind)[0], docs.get(leaf.key[len(prefix) :], "")
        yield from _row(leaf.key, doc) if is_section(leaf.kind) else _row(_left(leaf, plain), f"{_kind(leaf)}. {doc}")
        if is_section(inner):
            yield from _section(inner, leaf.key + ".", plain)
        elif is_section(element(inner)):
            yield from _section(element(inner), leaf.key + "[].", plain)


def _kind(leaf: Leaf) -> str:
    """The type; one that is too long for a line can be broken."""
    kind = short(leaf.kind)
    return kind if len(kind) < _WIDTH - _COLUMN else kind.replace("|", " | ")


def _left(leaf: Leaf, plain: Sequence[Mapping[str, Any]]) -> str:
    for settings in plain:
        stated, value = find(settings, leaf.key)
        if stated:
            return f"{leaf.key}={show(value)}"
    if leaf.default is dataclasses.MISSING:
        return f"{leaf.key} (required)"
    return f"{leaf.key}={show(leaf.default)}"


def _examples(program: str) -> Iterator[str]:
    for command, why in _EXAMPLES:
        yield f"  # {why}"
        yield "  " + command.format(program=_command(program), script=program)
