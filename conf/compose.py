"""From a command line to a frozen Config, or to one refusal that lists everything wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conf.batch import with_micro_batch
from conf.convert import read
from conf.groups import Groups, folder_problems, read_groups
from conf.layers import Layer, located
from conf.merge import merge
from conf.overrides import check
from conf.problem import Problem, refuse
from conf.schema import Config
from conf.validate import problems as rule_problems


def compose(overrides: Sequence[str], config_dir: str | None = None, *, world: int = 1, here: bool = True) -> Config:
    """The configuration of a run by `world` processes.

    Hydra merges conf/config.yaml, the chosen groups, the experiment and the overrides; the types and rules
    are ours. Of train.steps and train.tokens the later one counts: a layer (a file, or the command line as a
    whole) that sets one of them drops what earlier layers said of the other. `here`: it must work on this
    machine too.
    """
    config, problems = attempt(overrides, config_dir, world=world, here=here)
    refuse(problems)
    return with_micro_batch(config, world)


def attempt(
    overrides: Sequence[str], config_dir: str | None = None, *, world: int = 1, here: bool = True
) -> tuple[Config, list[Problem]]:
    """The configuration and all that is wrong with it; with problems, it is not to be used."""
    bad_folder = folder_problems(config_dir)
    groups = read_groups(None if bad_folder else config_dir)
    accepted, refused = check(overrides, groups)
    merged = merge(accepted, groups)
    config, mistyped = read(merged.content)
    unresolved = _keys(merged.problems)
    found = [*merged.problems, *(each for each in mistyped if each.key not in unresolved)]
    wrong = [*bad_folder, *refused, *_in_words(found, merged.layers, groups)]
    if not merged.complete:  # what the files say is not known, so no rule can be judged
        return config, [each for each in wrong if "${" not in (each.value or "")]
    broken = located(rule_problems(config, world=world, here=here), merged.layers)
    return config, [*wrong, *(each for each in broken if not _blurred(each, wrong, groups))]


def _keys(problems: Iterable[Problem]) -> set[str]:
    return {problem.key for problem in problems}


def _blurred(problem: Problem, earlier: Iterable[Problem], groups: Groups) -> bool:
    """Whether a rule reads a key whose own value was already refused, so that its verdict means nothing."""
    concerned = {problem.key, *problem.also}
    return any(
        each.key == key
        or each.key.startswith((f"{key}.", f"{key}["))
        or (key.startswith(f"{each.key}.") and (each.key in groups.choices or each.source != ""))
        for each in earlier
        for key in concerned
    )


def _in_words(problems: Iterable[Problem], layers: Sequence[Layer], groups: Groups) -> list[Problem]:
    """The problems with their files; a file whose place is the mistake gets a fix that says so."""
    return [_misplaced(each, groups) for each in located(problems, layers)]


def _misplaced(problem: Problem, groups: Groups) -> Problem:
    head, _, rest = problem.key.partition(".")
    if not problem.source or head not in groups.choices:
        return problem
    if head == "experiment":
        fix = "make `# @package _global_` the first line of the file"
        rule = "an experiment sets keys of all sections, but this one sets keys of its own name"
        return Problem(problem.key, problem.value, rule, fix, source=problem.source)
    if rest == head:
        fix = f"remove the outer `{head}:` and write its keys at the left margin"
        rule = f"the keys of this file stand below `{head}` already"
        return Problem(problem.key, problem.value, rule, fix, source=problem.source)
    return problem
