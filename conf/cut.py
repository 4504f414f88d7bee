"""A configuration cut over so many processes; what is wrong with the cut; cures, each tried before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from math import gcd
from typing import Any

from conf.batch import chosen_micro_batch
from conf.problem import Problem, assign, show
from conf.schema import Config
from model.config import MoEConfig
from parallel.schedules import SCHEDULES, ScheduleKind, schedule_name

_TRIES = 500
"""Candidates of one stream that are tried at most."""


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
    chosen: bool = False
    """Whether the micro-batch is the one chosen for this cut, so that another cut gets another."""

    @property
    def tp(self) -> int:
        """Ranks that share each block."""
        return self.config.parallel.tp

    @property
    def pp(self) -> int:
        """Ranks that share the layers."""
        return self.config.parallel.pp

    @property
    def cp(self) -> int:
        """Ranks that share the tokens of each sequence."""
        return self.config.parallel.cp

    @property
    def ep(self) -> int:
        """Ranks that share the experts."""
        return self.config.parallel.ep

    @property
    def moe(self) -> MoEConfig | None:
        """The experts, if there are any."""
        return self.config.model.moe

    @property
    def held(self) -> int:
        """Processes that work on the same samples: together they hold one model."""
        return self.tp * self.pp * self.cp

    @property
    def fits(self) -> bool:
        """Whether the processes make whole models."""
        return self.world % self.held == 0

    @property
    def shared(self) -> int:
        """What each tp that suits the model divides."""
        model = self.config.model
        return gcd(model.heads, model.kv_heads, model.vocab_multiple, *self.widths.values())

    @property
    def widths(self) -> dict[str, int]:
        """Widths of MLPs that tensor parallelism cuts, by key; that of routed experts is not cut."""
        moe, ffn = self.moe, {"model.ffn": self.config.model.ffn}
        if moe is None or moe.first_dense >= self.config.model.layers:
            return ffn
        all_sparse = moe.first_dense == 0 and (moe.every == 1 or self.config.model.layers == 1)
        shared = {"model.moe.shared_ffn": moe.shared_ffn} if moe.shared_ffn else {}
        return shared if all_sparse else ffn | shared

    @property
    def has_chunks(self) -> bool:
        """Whether sequences are cut evenly for context parallelism: each rank has an early and a late chunk."""
        return self.cp == 1 or self.config.train.seq_len % (2 * self.cp) == 0

    @property
    def expert_room(self) -> int:
        """Processes among which the experts may be shared: one stage's, or of that one replica's."""
        parallel = self.config.parallel
        replicas = parallel.replicate if parallel.zero and self.dp % parallel.replicate == 0 else 1
        return self.dp // replicas * self.cp * self.tp

    @property
    def suits(self) -> bool:
        """Whether some number of processes can cut the model like this."""
        even = self.shared % self.tp == 0 and self.has_chunks
        return even and self.pp * self.stages <= self.config.model.layers

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
        """What a dotted key is set to."""
        node: Any = self.config
        for name in key.split("."):
            node = getattr(node, name)
        return node

    def cured(self, cure: Cure) -> Cut:
        """The cut with other settings or processes."""
        config = self.config
        for key, value in cure.settings.items():
            config = _with(config, key.split("."), value)
        other = Cut(config, cure.processes or self.world, self.chosen and "train.micro_batch" not in cure.settings)
        if other.chosen:
            size = chosen_micro_batch(config, other.world)
            return replace(other, config=_with(config, ["train", "micro_batch"], size))
        return other


def _with(node: Any, path: Sequence[str], value: Any) -> Any:
    """A dataclass with another value at the end of a path."""
    name, *below = path
    return replace(node, **{name: _with(getattr(node, name), below, value) if below else value})


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
