"""The command line taken apart: overrides and --flags, in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.problem import Problem, refuse
from conf.suggest import close, likely_keys
from conf.tree import leaves


@dataclass(frozen=True)
class Flag:
    """An option of a command."""

    names: tuple[str, ...]
    """Its spellings, the full one first, with dashes."""
    argument: str | None
    """What follows it, in capitals; null: nothing."""
    doc: str
    """One line for --help."""


@dataclass(frozen=True)
class Invocation:
    """A command line, taken apart."""

    overrides: tuple[str, ...]
    """key=value words, in order."""
    flags: Mapping[str, str]
    """Full flag name to its argument, empty where it takes none."""

    @property
    def config_dir(self) -> str | None:
        """The user's own folder of YAML files."""
        return self.flags.get("--config-dir")

    @property
    def help(self) -> bool:
        """Whether the help text is asked for."""
        return "--help" in self.flags

    @property
    def multirun(self) -> bool:
        """Whether sweeps are to be run."""
        return "--multirun" in self.flags


CONFIG_DIR = Flag(
    ("--config-dir", "-cd"), "DIR", "a folder of your own YAML files, GROUP/NAME.yaml, chosen as GROUP=NAME"
)
HELP = Flag(("--help", "-h"), None, "show this text")
FLAGS = (
    HELP,
    Flag(("--cfg", "-c"), "job", "print the whole configuration as YAML and stop"),
    CONFIG_DIR,
    Flag(("--multirun", "-m"), None, "run every combination of the values in key=a,b,c, one after another"),
)
"""The options of every command that starts a run."""
_HYDRA = {
    "--config-name": "write your settings to DIR/experiment/NAME.yaml, then --config-dir DIR experiment=NAME",
    "-cn": "write your settings to DIR/experiment/NAME.yaml, then --config-dir DIR experiment=NAME",
    "--config-path": "write --config-dir DIR: its files are found besides the repository's",
    "-cp": "write --config-dir DIR: its files are found besides the repository's",
    "--resolve": "leave it out: --cfg job always prints resolved values",
    "--info": "write --cfg job",
    "--package": "leave it out: --cfg job prints everything",
    "-p": "leave it out: --cfg job prints everything",
    "--hydra-help": "write --help",
    "--run": "leave it out: a run is what happens without flags",
    "-r": "leave it out: a run is what happens without flags",
}
"""Hydra's other flags, and what to do here."""


def parse(argv: Sequence[str], flags: Sequence[Flag] = FLAGS) -> Invocation:
    """Words with a dash before them are flags, all others overrides; raises ConfigRefused."""
    by_name = {name: flag for flag in flags for name in flag.names}
    overrides: list[str] = []
    given: dict[str, str] = {}
    problems: list[Problem] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = by_name.get(name)
        if flag is None:
            problems.append(_unknown(word, by_name))
        elif flag.argument is None:
            given[flag.names[0]] = ""
            problems += [_takes_none(word, name)] if equals else []
        elif equals or (words and not words[0].startswith("-")):
            given[flag.names[0]] = value if equals else words.pop(0)
        else:
            problems.append(Problem(word, None, f"{name} needs a value", f"write {name} {flag.argument}"))
    refuse(problems)
    return Invocation(tuple(overrides), given)


def _takes_none(word: str, name: str) -> Problem:
    return Problem(word, None, f"{name} takes no value", f"write {name}")


def _unknown(word: str, known: Mapping[str, Flag]) -> Problem:
    name, equals, value = word.partition("=")
    if name in _HYDRA:
        return Problem(word, None, f"Hydra's {name} is not used here", _HYDRA[name])
    bare, by_bare = name.lstrip("-"), {each.lstrip("-"): each for each in known}
    meant = [] if equals else close(bare, by_bare)
    if meant:
        flag = by_bare[meant[0]]
        return Problem(word, None, f"unknown flag {name}; did you mean {flag}?", f"write {flag}")
    likely = likely_keys(bare, leaves())
    if equals or likely:
        setting = f"{(likely or [bare])[0]}={value if equals else 'VALUE'}"
        return Problem(word, None, f"unknown flag {name}", f"settings have no dashes: write {setting}")
    names = ", ".join(flag.names[0] for flag in dict.fromkeys(known.values()))
    fix = f"the flags are {names}; settings are key=value"
    return Problem(word, None, f"unknown flag {name}", fix)
