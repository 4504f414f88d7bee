"""What is wrong with a setting, in words; every refusal of a configuration is a list of these."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from errors import ConfigRefused

_LONGEST_VALUE = 120


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what was given, which rule it breaks, and what to write instead."""

    key: str
    """Dotted key, or the words as they were typed."""
    value: str | None
    """What was given, as it would be written; null: nothing to show."""
    rule: str
    """The rule that is broken."""
    fix: str
    """What to do about it."""
    also: tuple[str, ...] = ()
    """Other keys that the rule reads."""
    source: str = ""
    """Where the value came from, when that is not the command line."""

    def __str__(self) -> str:
        given = self.key if self.value is None else f"{self.key}={self.value}"
        where = f"  (in {self.source})" if self.source else ""
        return f"{given}{where}\n     rule: {self.rule}\n     fix:  {self.fix}"


def show(value: object, longest: int | None = _LONGEST_VALUE) -> str:
    """A value as it would be written on the command line, cut when it is longer than so many characters."""
    text = _written(value)
    return text if longest is None or len(text) <= longest else text[: longest - 3] + "..."


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    if isinstance(value, str):
        return value if value.isprintable() and value.strip() == value != "" else json.dumps(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return str(value)


def assign(key: str, value: object) -> str:
    """`key=value` as it would be typed in a shell."""
    text = f"{key}={show(value)}"
    return f"'{text}'" if re.search(r"[\s\[\]{}()*~$\"&|;<>]", text) else text


def message(problems: Sequence[Problem], title: str = "The configuration is refused") -> str:
    """Every problem, numbered, under a title that counts them."""
    count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
    lines = [f"{number:>3}. {problem}" for number, problem in enumerate(problems, 1)]
    return "\n".join([f"{title}: {count}.", *lines])


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one ConfigRefused that lists all problems, if there are any."""
    found = list(dict.fromkeys(problems))
    if found:
        raise ConfigRefused(message(found) + "\nEvery key, its type and its default: --help")
