"""Transformer Engine's interface, read from its sources without importing it, and our calls to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "transformer_engine"
INSTANCES = {"self.linear": f"{PACKAGE}.pytorch.Linear"}
"""What variables of te.py hold."""


@cache
def folder() -> Path:
    """Where the sources are."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("transformer-engine's sources are not installed: pip install --no-deps transformer-engine==2.20.2")
    return Path(spec.submodule_search_locations[0])


class Found(NamedTuple):
    """A definition, and the module that it stands in."""

    module: str
    node: ast.ClassDef | ast.FunctionDef


@cache
def _tree(module: str) -> ast.Module | None:
    """Of a module by its dotted name; None: there is none."""
    path = folder().joinpath(*module.split(".")[1:])
    for each in (path / "__init__.py", path.with_suffix(".py")):
        if each.is_file():
            return ast.parse(each.read_text())
    return None


def find(dotted: str) -> Found:
    """What a dotted name stands for, through imports and base classes."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if (tree := _tree(module)) is not None:
            return _inside(module, tree.body, parts[count:], dotted)
    raise LookupError(dotted)


def _inside(module: str, body: list[ast.stmt], names: list[str], dotted: str) -> Found:
    name, *rest = names
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return _member(Found(module, node), rest, dotted) if rest else Found(module, node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(".".join([_absolute(module, node), alias.name, *rest]))
    raise LookupError(f"{dotted}: {module} has no {name}")


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    path = folder().joinpath(*module.split(".")[1:])
    up = node.level - 1 if path.is_dir() else node.level
    base = module.split(".")[: len(module.split(".")) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


def _member(owner: Found, names: list[str], dotted: str) -> Found:
    """An attribute of a class, its own or of a base."""
    if not isinstance(owner.node, ast.ClassDef):
        raise LookupError(f"{dotted}: {owner.node.name} is no class")
    try:
        return _inside(owner.module, owner.node.body, names, dotted)
    except LookupError:
        for base in owner.node.bases:
            if isinstance(base, ast.Name) and _tree(owner.module) is not None:
                try:
                    return _member(find(f"{owner.module}.{base.id}"), names, dotted)
                except LookupError:
                    continue
        raise


def source_of(dotted: str) -> str:
    """Text of a definition, with single spaces."""
    return " ".join(ast.unparse(find(dotted).node).split())


def signature(dotted: str) -> Signature:
    """Of a call of a function, a method of an instance or class, or a class."""
    found = find(dotted)
    if isinstance(found.node, ast.FunctionDef):
        decorators = {each.id for each in found.node.decorator_list if isinstance(each, ast.Name)}
        bound = bool(found.node.args.args) and found.node.args.args[0].arg in ("self", "cls")
        return _of(found.node.args, skip=int(bound and "staticmethod" not in decorators))
    if "dataclass" in " ".join(ast.unparse(each) for each in found.node.decorator_list):
        return Signature([
            Parameter(node.target.id, Parameter.POSITIONAL_OR_KEYWORD, default=None if node.value else Parameter.empty)
            for node in found.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ])  # fmt: skip
    return signature(f"{dotted}.__init__")


def _of(args: ast.arguments, skip: int) -> Signature:
    """A signature; what defaults are is of no account."""
    plain = [*args.posonlyargs, *args.args]
    first = len(plain) - len(args.defaults)
    kinds = [
        Parameter(each.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if n < first else None)
        for n, each in enumerate(plain)
    ][skip:]
    if args.vararg:
        kinds.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        kinds.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=None if default else Parameter.empty))
    if args.kwarg:
        kinds.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(kinds)


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call of Transformer Engine in a file: the dotted name of what is called, and the call."""
    names = dict(INSTANCES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith(PACKAGE)}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        for name, meant in names.items():
            if called == name:
                yield f"{meant}.forward" if name in INSTANCES else meant, node
            elif called.startswith(f"{name}.") and called.replace(".", "").isidentifier():
                yield meant + called[len(name) :], node


def unbound(tree: ast.Module) -> list[str]:
    """Calls of Transformer Engine that its signatures do not take, in words."""
    faults = []
    for target, call in calls(tree):
        given = {each.arg: None for each in call.keywords if each.arg}
        try:
            signature(target).bind(*call.args, **given)
        except (TypeError, LookupError) as error:
            faults.append(f"line {call.lineno}, {target}: {error}")
    return faults
