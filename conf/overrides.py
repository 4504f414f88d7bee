"""The overrides of a command line: each parsed by Hydra's grammar and checked against the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.groups import Groups
from conf.problem import Problem, assign
from conf.suggest import close, did_you_mean, unknown_key
from conf.tree import Leaf, element, is_section, leaves, optional, own_leaves, sample, sections, words

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_NOTES = "extra"


@dataclass(frozen=True)
class Accepted:
    """An override that Hydra may see."""

    text: str
    """What Hydra is given."""
    key: str
    """Key or group."""
    value: Any
    """Plain value; for a group, its choice."""
    is_group: bool
    """Whether it chooses a file."""


def parse(text: str) -> Override:
    """One override in Hydra's grammar; raises HydraException on a syntax error."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


def quoted(text: str) -> str:
    """Text as Hydra's grammar quotes it, whatever characters it holds."""
    from hydra.core.override_parser.types import Quote, QuotedString

    written: str = QuotedString(text, Quote.single).with_quotes()
    return written


def check(texts: Iterable[str], groups: Groups) -> tuple[list[Accepted], list[Problem]]:
    """The overrides that are sound, and what is wrong with the others."""
    checker = _Checker(groups, leaves())
    results = [checker.one(text) for text in texts]
    accepted = [result for result in results if isinstance(result, Accepted)]
    return _last_choices(accepted), [result for result in results if isinstance(result, Problem)]


def _last_choices(accepted: Sequence[Accepted]) -> list[Accepted]:
    """Of several choices of a group, the last: Hydra would let a removal win over a later choice."""
    last = {each.key: each for each in accepted if each.is_group}
    return [each for each in accepted if not each.is_group or "@" in each.text or last[each.key] is each]


@dataclass(frozen=True)
class _Checker:
    groups: Groups
    known: Mapping[str, Leaf]

    def one(self, text: str) -> Accepted | Problem:
        """The override as Hydra shall read it, or what is wrong with it."""
        from hydra.errors import HydraException

        try:
            override = parse(text)
        except HydraException as error:
            return _syntax(text, error, self.known)
        if not override.key_or_group:
            return _syntax(text, None, self.known)
        if override.key_or_group == "hydra" or override.is_hydra_override():
            rule = "Hydra's own settings are not used here: it writes no files and starts no jobs"
            return Problem(text, None, rule, "leave it out; run.dir says where runs go")
        if override.is_sweep_override():
            return self._sweep(override)
        if override.is_delete():
            return self._deletion(override, text)
        if not isinstance(override.value(), Mapping) and self._names_a_group(override):
            return self._group(override, text)
        return self._key(override, text)

    def _names_a_group(self, override: Override) -> bool:
        return override.key_or_group in self.groups.choices or override.package is not None

    def _deletion(self, override: Override, text: str) -> Accepted | Problem:
        key = override.key_or_group
        if key.startswith(_NOTES + ".") or self.groups.chosen.get(key, "") is None:
            return Accepted(text, key, None, key in self.groups.choices)
        if key in self.groups.choices:
            return Problem(text, None, f"a run needs a choice of {key}", f"write {key}={self._usual(key)}")
        if key not in self.known and key not in sections():
            return unknown_key(key, None, self.known)
        nullable = key in self.known and optional(self.known[key].kind)[1]
        fix = f"write {key}=null" if nullable else "leave it out: a key that is not set takes its default"
        return Problem(text, None, "a key of the schema cannot be deleted", fix)

    def _choices(self, group: str) -> Sequence[str]:
        return self.groups.choices.get(group, ())

    def _usual(self, group: str) -> str:
        return self.groups.chosen.get(group) or next(iter(self._choices(group)), "NAME")

    def _group(self, override: Override, text: str) -> Accepted | Problem:
        group, value = override.key_or_group, override.value()
        primary = group in self.groups.chosen
        added = override.is_add() or override.is_force_add()
        written = override.get_value_string()
        if added and primary and override.package is None:
            return Problem(text, None, "a group that has a choice already takes no +", f"write {group}={written}")
        if not added and not primary and override.package is None:
            rule = f"the group {group} is not part of every run"
            return Problem(text, None, rule, f"write +{group}={written}")
        if value is None and self.groups.chosen.get(group, "") is None:
            return Accepted(f"~{group}", group, None, True)
        for choice in value if isinstance(value, list) else [value]:
            name = written if choice is value else str(choice)
            if name.strip("'\"").removesuffix(".yaml") not in self._choices(group):
                return self._no_choice(group, name)
        return Accepted(text, group, value, True)

    def _no_choice(self, group: str, name: str) -> Problem:
        choices = self._choices(group)
        hint = did_you_mean(name, choices)
        listed = f"the choices of {group} are {', '.join(choices)}" if choices else f"there is no group {group}"
        fix = f"write {group}={(close(name, choices) or [self._usual(group)])[0]}"
        return Problem(group, name, f"{listed}" + (f"; {hint}" if hint else ""), fix)

    def _key(self, override: Override, text: str) -> Accepted | Problem:
        key, written, value = override.key_or_group, override.get_value_string(), override.value()
        is_note = key == _NOTES or key.startswith(_NOTES + ".")
        if not is_note:
            problem = self._unset(key, written, value)
            if problem is not None:
                return replace(problem, key=f"+{problem.key}") if override.is_add() else problem
            if override.is_add():
                return Problem(text, None, "+ adds new keys, and only extra takes those", f"write {key}={written}")
        elif key == _NOTES and not isinstance(value, Mapping):
            return Problem(key, written, "extra is a section of your own notes", f"write +{_NOTES}.NAME={written}")
        return Accepted(f"++{key}={self._text(key, written, value)}", key, value, False)

    def _sweep(self, override: Override) -> Problem:
        key, written = override.key_or_group, override.get_value_string()
        is_note = key.startswith(_NOTES + ".")
        unset = None if is_note or self._names_a_group(override) else self._unset(key, written, None)
        return unset or _sweep(key, written)

    def _text(self, key: str, written: str, value: Any) -> str:
        """For a text key, a bare 007 or 1e3 stays the characters that were typed."""
        kind = optional(self.known[key].kind)[0] if key in self.known else None
        if kind is str and isinstance(value, (bool, int, float)):
            return quoted(written.strip())
        return written

    def _unset(self, key: str, written: str, value: Any) -> Problem | None:
        """Why a key outside extra cannot be set, if it cannot."""
        if key in self.known:
            return None
        if key in sections():
            return None if isinstance(value, Mapping) else _section(key, written)
        above = _leaf_above(key, self.known)
        if above is not None:
            return _below_leaf(key, written, above)
        return unknown_key(key, written, self.known)


def _leaf_above(key: str, known: Mapping[str, Leaf]) -> Leaf | None:
    parts = key.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((known[head] for head in heads if head in known), None)


def _below_leaf(key: str, written: str, above: Leaf) -> Problem | None:
    """`data.sources.0.weight` names a field of a list's item; nothing else stands below a leaf."""
    rest = key[len(above.key) + 1 :].split(".")
    item = element(optional(above.kind)[0])
    if is_section(item) and len(rest) == 2 and rest[0].isdigit():
        names = [leaf.key for leaf in own_leaves(item)]
        if rest[1] in names:
            return None
        hint = did_you_mean(rest[1], names)
        rule = f"unknown key `{rest[1]}` in an item of {above.key}" + (f"; {hint}" if hint else "")
        return Problem(key, written, rule, f"its keys: {', '.join(names)}")
    if is_section(optional(above.kind)[0]):
        names = [leaf.key for leaf in own_leaves(optional(above.kind)[0])]
        hint = did_you_mean(rest[0], names)
        rule = f"unknown key `{key}`; {hint}".rstrip("; ")
        return Problem(key, written, rule, f"the keys of {above.key}: {', '.join(names)}")
    rule = f"{above.key} is {words(above.kind)}: it has no keys below it"
    return Problem(key, written, rule, f"write {assign(above.key, sample(above.kind, above.default))}")


def _section(key: str, written: str) -> Problem:
    first, *more = own_leaves(sections()[key])
    example = assign(f"{key}.{first.key}", sample(first.kind, first.default))
    rest = ", ".join(leaf.key for leaf in [first, *more])
    fix = f"set one of its keys, such as {example} (keys: {rest})"
    return Problem(key, written, f"{key} is a section, not a single value", fix)


def _sweep(key: str, written: str) -> Problem:
    rule = "several values are a sweep, and this command runs once"
    fix = "add -m to run each"
    if re.fullmatch(r"[^()\[\]]*", written):
        fix += f"; for a list write '{key}=[{written}]', for text with a comma '{key}=\"{written}\"'"
    return Problem(key, written, rule, fix)


def _syntax(text: str, error: Exception | None, known: Mapping[str, Leaf]) -> Problem:
    if text.startswith("-"):
        fix = f"write {text.lstrip('-')}" if "=" in text else "flags go to the command itself; see --help"
        return Problem(text, None, "an override has no dashes before it", fix)
    if "=" not in text or not text.partition("=")[0].strip():
        key = text.strip("= ")
        likely = key if key in known else next(iter(close(key, known)), "KEY")
        fix = f"write {likely}=VALUE, with no spaces around ="
        return Problem(text or "''", None, "an override has the form key=value", fix)
    key, value = text.split("=", 1)
    if not re.fullmatch(r"[~+]{0,2}[\w./@-]+", key):
        fix = "write key=value, with no spaces around ="
        return Problem(text, None, f"`{key}` is not a key: words joined by dots", fix)
    detail = str(error).strip().splitlines()[0]
    quoted = value.strip("'\"").replace('"', '\\"')
    fix = f"quote the value for Hydra and the shell: '{key}=\"{quoted}\"'"
    return Problem(text, None, f"the value cannot be parsed ({detail})", fix)
