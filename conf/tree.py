"""The schema as a tree of keys: names, types, defaults and the docs below each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from conf.problem import show
from conf.schema import Config


@dataclass(frozen=True)
class Leaf:
    """One key that can be set."""

    key: str
    """Dotted key."""
    kind: Any
    """Its type, as annotated."""
    default: Any
    """Its default; dataclasses.MISSING where it must be given."""
    owner: type
    """The dataclass that declares it."""


def optional(kind: Any) -> tuple[Any, bool]:
    """The type without None, and whether None was allowed."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    inner = [each for each in get_args(kind) if each is not type(None)]
    return inner[0], True


def is_section(kind: Any) -> bool:
    """Whether the type is a dataclass of ours, so a key that has keys below it."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def element(kind: Any) -> Any:
    """T of tuple[T, ...], else None."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def own_leaves(owner: type, prefix: str = "") -> list[Leaf]:
    """The fields of one dataclass, in order."""
    hints = get_type_hints(owner)
    return [Leaf(prefix + f.name, hints[f.name], _default(f), owner) for f in dataclasses.fields(owner)]


def _default(declared: dataclasses.Field[Any]) -> Any:
    if declared.default_factory is not dataclasses.MISSING:
        return declared.default_factory()
    return declared.default


def _walk(owner: type, prefix: str) -> Iterator[Leaf]:
    for leaf in own_leaves(owner, prefix):
        inner, nullable = optional(leaf.kind)
        if not is_section(inner) or nullable:
            yield leaf
        if is_section(inner):
            yield from _walk(inner, leaf.key + ".")


def leaves(root: type = Config) -> dict[str, Leaf]:
    """Every key that can be set, by dotted name, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(root, "")}


def sections(root: type = Config) -> dict[str, type]:
    """The top-level sections that have keys of their own: name to dataclass."""
    return {leaf.key: leaf.kind for leaf in own_leaves(root) if is_section(leaf.kind)}


def field_docs(owner: type) -> dict[str, str]:
    """The docstring line below each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    statements = body.body if isinstance(body, ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(statements):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}
_SHORT: dict[Any, str] = {int: "int", float: "float", bool: "true|false", str: "text"}


def words(kind: Any) -> str:
    """A type in words, for a message."""
    inner, nullable = optional(kind)
    if nullable:
        return f"{words(inner)}, or null"
    if get_origin(inner) is Literal:
        return "one of " + ", ".join(show(choice) for choice in get_args(inner))
    if is_section(inner):
        return "a mapping with keys " + ", ".join(f.name for f in dataclasses.fields(inner))
    if element(inner) is not None:
        return f"a list, each item {words(element(inner))}"
    if get_origin(inner) is dict and get_args(inner)[1] is not Any:
        return f"names, each with {words(get_args(inner)[1])}"
    return _WORDS.get(inner, "a mapping of your own keys")


def short(kind: Any) -> str:
    """A type in a few letters, for a table."""
    inner, nullable = optional(kind)
    if nullable:
        return f"{short(inner)}|null"
    if get_origin(inner) is Literal:
        return "|".join(show(choice) for choice in get_args(inner))
    if is_section(inner):
        return "mapping"
    if element(inner) is not None:
        return f"list of {'mappings' if is_section(element(inner)) else short(element(inner))}"
    return _SHORT.get(inner, "mapping")


_SAMPLES: dict[Any, Any] = {int: 100, float: 0.001, bool: True, str: "TEXT"}


def sample(kind: Any, default: Any = None) -> Any:
    """A value that the type accepts: the default where that says something, else a likely one."""
    if default not in (None, (), dataclasses.MISSING) and not isinstance(default, (dict, bool)):
        return default
    inner, _ = optional(kind)
    if get_origin(inner) is Literal:
        return get_args(inner)[0]
    if is_section(inner):
        return {leaf.key: sample(leaf.kind, leaf.default) for leaf in own_leaves(inner)[:3]}
    if element(inner) is not None:
        return [sample(element(inner))]
    if get_origin(inner) is dict and get_args(inner)[1] is not Any:
        return {"NAME": sample(get_args(inner)[1])}
    return _SAMPLES.get(inner, {"note": "TEXT"})
