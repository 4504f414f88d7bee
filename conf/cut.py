"""A configuration cut over so many processes; what is wrong with the cut; cures, each tried before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from math import gcd, isqrt, log2
from typing import Any

from conf.problem import Problem, assign, show
from conf.schema import Config
from parallel.schedules import SCHEDULES, ScheduleKind, schedule_name

_TRIES = 500
"""Candidates of one stream that are tried at most."""
_SMALLER = 6
"""Smaller micro-batches that are tried with another layout."""
_MOST_STAGES = 1024
"""Pipeline ranks that are proposed at most."""


@dataclass(frozen=True)
class Cure:
    """Settings, or a number of processes, that may mend a fault."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key to value; all of them together."""
    processes: int | None = None
    """Processes to start; null: as many as now."""
    instead: tuple[Cure, ...] = ()
    """Tried in turn where this does not do."""


@dataclass(frozen=True)
class Cut:
    """A configuration and the processes that share its work; numbers that follow from both."""

    config: Config
    """Every single key is in its range."""
    world: int
    """Processes of the run."""

    @property
    def tp(self) -> int:
        """Ranks that share each block."""
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        """Ranks that share the layers."""
        return self.config.parallel.pp

    @property
    def held(self) -> int:
        """Processes that hold one model together."""
        return self.tp * self.pp

    @property
    def fits(self) -> bool:
        """Whether the processes make whole models."""
        return self.world % self.held == 0

    @property
    def shared(self) -> int:
        """What each tp that suits the model divides."""
        model = self.config.model
        return gcd(model.heads, model.kv_heads, model.ffn, model.vocab_multiple)

    @property
    def suits(self) -> bool:
        """Whether some number of processes can cut the model like this."""
        return self.shared % self.tp == 0 and self.pp * self.stages <= self.config.model.layers

    @property
    def dp(self) -> int:
        """Ranks that read different samples; 1 where that is not known: what breaks then breaks with any number."""
        return max(1, self.world // self.held) if self.fits else 1

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return schedule_name(self.config.parallel)

    @property
    def kind(self) -> ScheduleKind:
        """What that schedule is."""
        return SCHEDULES[self.schedule]

    @property
    def stages(self) -> int:
        """Stages a rank that the schedule can have, as near to parallel.vpp as it goes."""
        if self.pp == 1 or not self.kind.several:
            return 1
        return 2 if self.kind.v_shaped else max(2, self.config.parallel.vpp or 2)

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step on one data-parallel rank."""
        return self.config.train.global_batch // (self.config.train.micro_batch * self.dp)

    def value(self, key: str) -> Any:
        """What a dotted key of a section is set to."""
        section, name = key.split(".")
        return getattr(getattr(self.config, section), name)

    def cured(self, cure: Cure) -> Cut:
        """The cut with other settings or processes."""
        config = self.config
        for key, value in cure.settings.items():
            section, name = key.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        return Cut(config, cure.processes or self.world)


@dataclass(frozen=True)
class Stream:
    """Possible cures of one sort, the nearest first."""

    cures: Iterable[Cure]
    """Perhaps cures."""
    most: int = 1
    """How many that work are proposed."""


@dataclass(frozen=True)
class Fault:
    """A broken rule before its cures are sought."""

    key: str
    """The key whose value is refused."""
    rule: str
    """The rule, to be read behind the value."""
    also: tuple[str, ...]
    """Other keys that the rule reads."""
    cures: Callable[[], Sequence[Stream]]
    """Where to look; called only for what is reported."""


Rule = Callable[[Cut], Fault | None]
"""One subject; None where all is well."""


def cut_problems(cut: Cut, rules: Sequence[Rule]) -> list[Problem]:
    """What is wrong with a cut, each fault with the nearest cures."""
    faults = {number: fault for number, rule in enumerate(rules) if (fault := rule(cut)) is not None}
    problems = []
    for number, fault in faults.items():
        found = _working(cut, rules, number, set(faults), fault.cures())
        fix = _words(found, cut.world) if found else "change one of the keys that the rule names"
        problems.append(Problem(fault.key, show(cut.value(fault.key)), fault.rule, fix, fault.also))
    return problems


def _working(cut: Cut, rules: Sequence[Rule], number: int, known: set[int], streams: Sequence[Stream]) -> list[Cure]:
    """The cures after which this rule holds and none breaks anew; if there are none, those that help this rule."""
    clean: list[Cure] = []
    partial: list[Cure] = []
    for stream in streams:
        good: list[Cure] = []
        fair: list[Cure] = []
        for cure in islice(stream.cures, _TRIES):
            left = ((each, _left(cut.cured(each), rules)) for each in (cure, *cure.instead))
            works = next((each for each, faults in left if faults <= known - {number}), None)
            if works is not None:
                good.append(works)
            elif number not in _left(cut.cured(cure), rules):
                fair.append(cure)
            if len(good) == stream.most:
                break
        clean += good
        partial += fair[: stream.most]
    return clean or partial


def _left(cut: Cut, rules: Sequence[Rule]) -> set[int]:
    """Numbers of the rules that a cut breaks."""
    return {number for number, rule in enumerate(rules) if rule(cut) is not None}


def _words(cures: Sequence[Cure], world: int) -> str:
    """Cures of the same keys stand together: `write a=1 or a=2, or b=3, or start 4 or 8 processes`."""
    parts: list[str] = []
    writing = False
    for keys, alike in groupby(cures, lambda cure: tuple(cure.settings)):
        if keys:
            settings = (" ".join(assign(key, value) for key, value in cure.settings.items()) for cure in alike)
            parts.append(("" if writing else "write ") + " or ".join(settings))
        else:
            parts.append(_start([cure.processes or 1 for cure in alike], world))
        writing = bool(keys)
    return ", or ".join(parts)


def _start(counts: Sequence[int], world: int) -> str:
    """How to start other numbers of processes; where there is one, its user may not know how."""
    text = f"start {' or '.join(map(str, counts))} process{'es' if counts != [1] else ''}"
    return f"{text}: torchrun --nproc-per-node {counts[0]} train.py ..." if world == 1 else text


def near(key: str, value: int, candidates: Iterable[int]) -> list[Stream]:
    """The nearest lower and the nearest higher value of a key."""
    ordered = sorted(set(candidates))
    lower = [Cure({key: each}) for each in reversed(ordered) if each < value]
    return [Stream(lower), Stream([Cure({key: each}) for each in ordered if each > value])]


def nearest_layouts(cut: Cut, most: int = 3) -> Stream:
    """Pairs of tp and pp that suit the model and the processes, by the factors between them and the asked ones."""
    stages = range(1, min(cut.config.model.layers, cut.world if cut.world > 1 else cut.pp, _MOST_STAGES) + 1)

    def distance(pair: tuple[int, int]) -> tuple[float, int]:
        return abs(log2(pair[0] / cut.tp)) + abs(log2(pair[1] / cut.pp)), -pair[0] * pair[1]

    def possible(tp: int, pp: int) -> bool:
        # One process stands for any number: it has not been started as it was meant.
        suits = cut.world % (tp * pp) == 0 if cut.world > 1 else tp * pp <= cut.held
        return suits and (tp, pp) != (cut.tp, cut.pp)

    pairs = sorted(((tp, pp) for tp in divisors(cut.shared) for pp in stages if possible(tp, pp)), key=distance)
    return Stream((_layout(cut, tp, pp) for tp, pp in pairs), most)


def _layout(cut: Cut, tp: int, pp: int) -> Cure:
    """A pair of tp and pp, with smaller micro-batches where it needs them."""
    pair = Cure({"parallel.tp": tp, "parallel.pp": pp})
    other, train = cut.cured(pair), cut.config.train
    parts = divisors(train.global_batch // other.dp) if train.global_batch % other.dp == 0 else []
    smaller = [part for part in reversed(parts) if part < train.micro_batch][:_SMALLER]
    return Cure(pair.settings, instead=tuple(Cure({**pair.settings, "train.micro_batch": part}) for part in smaller))


def starts(cut: Cut) -> list[Stream]:
    """The nearest numbers of processes that make whole models, if the model can be cut so; from one, the least."""
    if not cut.suits:
        return []
    whole = cut.world // cut.held
    higher = Stream(_processes(cut, range(whole + 1, whole + 65)))
    return [higher] if cut.world == 1 else [Stream(_processes(cut, range(min(whole, cut.world), 0, -1))), higher]


def _processes(cut: Cut, models: Iterable[int]) -> Iterator[Cure]:
    return (Cure(processes=count * cut.held) for count in models if count * cut.held != cut.world)


def divisors(number: int) -> list[int]:
    """Ascending; of an absurdly large number, those with a factor below 20,000."""
    small = [each for each in range(1, min(isqrt(number), 20_000) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
