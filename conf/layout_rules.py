"""Rules of the cut over processes: each rank has an equal share, and each pipeline schedule what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import lcm, prod

from conf.batch import with_micro_batch
from conf.context_rules import CONTEXT_RULES
from conf.cures import divisors, multiples, near, nearest_layouts, starts
from conf.cut import Cure, Cut, Fault, Rule, Stream, cut_problems
from conf.moe_rules import MOE_RULES
from conf.problem import Problem
from conf.schema import Config

_BATCH = ("train.global_batch", "train.micro_batch")
_HELD = ("parallel.tp", "parallel.pp", "parallel.cp")
_SPARSE = ("model.moe", "model.moe.first_dense", "model.moe.every", "model.layers")
_STAGES = ("parallel.pp", "parallel.vpp", "parallel.schedule")
_MOST_ROWS = 65_536
"""Largest model.vocab_multiple."""
_MOST_STAGES = 24
"""Stages whose layers are written out at most; a longer list would be cut in a message."""


def layout_problems(config: Config, world: int) -> list[Problem]:
    """Why `world` processes cannot train this configuration, each reason with the nearest that they can."""
    chosen = config.train.micro_batch == 0
    return cut_problems(Cut(with_micro_batch(config, world), world, chosen), _RULES)


def _processes(cut: Cut) -> Fault | None:
    if cut.fits:
        return None
    keys = _HELD if cut.cp > 1 else _HELD[:2]
    sizes = [cut.value(key) for key in keys]
    key = next(key for count, key in enumerate(keys, 1) if cut.world % prod(sizes[:count]))
    rule = (
        f"{' * '.join(keys)} = {' * '.join(map(str, sizes))} = {cut.held} processes hold a model together, so their "
        f"number must be a multiple of {cut.held}, but it is {cut.world}"
    )
    return Fault(key, rule, _HELD, lambda: [*starts(cut), nearest_layouts(cut)])


def _replicas(cut: Cut) -> Fault | None:
    parallel = cut.config.parallel
    groups, alone = parallel.replicate, parallel.zero == 0
    if not cut.fits or (groups in (1, cut.dp) if alone else cut.dp % groups == 0):
        return None
    if alone:
        whole = "1" if cut.dp == 1 else f"1 (left alone) or {cut.dp}"
        rule = f"must be {whole} with parallel.zero=0, which shares nothing among the {_ranks(cut)}"
    else:
        rule = f"must divide the {_ranks(cut)}"
    fitting = (1, cut.dp) if alone else divisors(cut.dp)
    zero = Stream([Cure({"parallel.zero": 1})] if alone else [])
    return Fault(
        "parallel.replicate", rule, (*_HELD, "parallel.zero"),
        lambda: [*near("parallel.replicate", groups, fitting), zero],
    )  # fmt: skip


def _ranks(cut: Cut) -> str:
    """The data-parallel ranks and where they come from."""
    origin = f" ({cut.world} processes, {cut.held} to a model)" if cut.held > 1 else ""
    return f"{cut.dp} data-parallel rank{'s' if cut.dp > 1 else ''}{origin}"


def _micro_batch(cut: Cut) -> Fault | None:
    whole, part = cut.config.train.global_batch, cut.config.train.micro_batch
    if whole % part == 0:
        return None
    rule = f"train.global_batch={whole} must be a multiple of it"
    return Fault("train.micro_batch", rule, _BATCH, lambda: _other_batches(cut))


def _batch(cut: Cut) -> Fault | None:
    whole, part, dp = cut.config.train.global_batch, cut.config.train.micro_batch, cut.dp
    if whole % part or whole % (part * dp) == 0:
        return None
    if whole % dp:
        key, rule = "train.global_batch", f"must be a multiple of the {_ranks(cut)}"
    else:
        key, rule = "train.micro_batch", f"train.global_batch={whole} must be a multiple of it times {_ranks(cut)}"

    def cures() -> list[Stream]:
        return [*_other_batches(cut), nearest_layouts(cut, 2), *starts(cut)]

    return Fault(key, rule, (*_BATCH, *_HELD), cures)


def _other_batches(cut: Cut) -> list[Stream]:
    """Batches near to those that do not divide: another part, else another whole, with another part if need be."""
    whole, part, dp = cut.config.train.global_batch, cut.config.train.micro_batch, cut.dp
    parts = near("train.micro_batch", part, divisors(whole // dp) if whole % dp == 0 else [])
    both = [
        {"train.global_batch": other, "train.micro_batch": max(d for d in divisors(other // dp) if d <= part)}
        for other in multiples(whole, dp)
    ]
    wholes = near("train.global_batch", whole, multiples(whole, part * dp) or [part * dp])
    return [*parts, Stream([Cure(pair) for pair in both] if whole % dp else [], 2), *wholes]


def _shares(*keys: str, mend: Callable[[int, int], Iterable[int]] | None = None) -> Rule:
    """The rule that tensor parallelism cuts these counts evenly; `mend` gives other values of a single one."""

    def rule(cut: Cut) -> Fault | None:
        """Whether tp divides each of the keys."""
        return _uneven(cut, keys, mend)

    return rule


def _uneven(cut: Cut, keys: Iterable[str], mend: Callable[[int, int], Iterable[int]] | None) -> Fault | None:
    uneven = [key for key in keys if cut.value(key) % cut.tp]
    if not uneven:
        return None
    words = "must divide " + " and ".join(f"{key}={cut.value(key)}" for key in uneven)

    def cures() -> list[Stream]:
        count = cut.value(uneven[0])
        return [nearest_layouts(cut), *(near(uneven[0], count, mend(count, cut.tp)) if mend else [])]

    return Fault("parallel.tp", words, tuple(keys), cures)


def _widths(*keys: str) -> Rule:
    """The same rule of a width inside MLPs, where the model has such MLPs."""

    def rule(cut: Cut) -> Fault | None:
        """Whether tp divides the width, if there is one."""
        fault = _uneven(cut, [key for key in keys if key in cut.widths], multiples)
        return fault and replace(fault, also=(*keys, *_SPARSE))

    return rule


def _padding(count: int, of: int) -> list[int]:
    """The vocabulary's multiple that tensor parallelism cuts evenly."""
    return [lcm(count, of)] if lcm(count, of) <= _MOST_ROWS else []


def _idle_schedule(cut: Cut) -> Fault | None:
    if cut.pp > 1 or cut.config.parallel.schedule == "auto":
        return None
    rule = "a schedule orders the ranks of a pipeline, but parallel.pp=1"
    cures = [Stream([Cure({"parallel.schedule": "auto"})])]
    return Fault("parallel.schedule", rule, ("parallel.pp",), lambda: [*cures, nearest_layouts(cut, 2)])


def _stages_a_rank(cut: Cut) -> Fault | None:
    vpp, kind = cut.config.parallel.vpp, cut.kind
    if vpp is None or vpp == cut.stages:
        return None
    if cut.pp == 1:
        rule = "several stages a rank need a pipeline, but parallel.pp=1"
    elif kind.v_shaped:
        rule = f"parallel.schedule={cut.schedule} has exactly 2 stages a rank"
    else:
        rule = f"parallel.schedule={cut.schedule} has {'at least 2 stages' if kind.several else 'one stage'} a rank"
    names = ("1f1b", "interleaved") if cut.pp > 1 else ()
    cures = [Stream([Cure({"parallel.vpp": None})]), Stream([Cure({"parallel.schedule": name}) for name in names])]
    return Fault("parallel.vpp", rule, _STAGES, lambda: [*cures, nearest_layouts(cut, 2)])


def _layers(cut: Cut) -> Fault | None:
    layers, stages = cut.config.model.layers, cut.pp * cut.stages
    if layers >= stages:
        return None
    rule = f"its {stages} stages ({cut.stages} a rank) need a layer each, but model.layers={layers}"
    parallel = cut.config.parallel

    def cures() -> list[Stream]:
        fewer = Stream([Cure({"parallel.vpp": layers // cut.pp})] if (parallel.vpp or 0) > 2 else [])
        single = {"parallel.vpp": None} | ({} if parallel.schedule == "auto" else {"parallel.schedule": "1f1b"})
        return [nearest_layouts(cut), fewer, Stream([Cure(single)] if cut.kind.several else [])]

    return Fault("parallel.pp", rule, ("model.layers", *_STAGES), cures)


def _given_layers(cut: Cut) -> Fault | None:
    given, layers, stages = cut.config.parallel.layers_per_stage, cut.config.model.layers, cut.pp * cut.stages
    if not given or (cut.pp > 1 and len(given) == stages and sum(given) == layers):
        return None
    if cut.pp == 1:
        rule = "layers are dealt out to the stages of a pipeline, but parallel.pp=1"
    elif len(given) != stages:
        rule = f"has {len(given)} entries, but parallel.pp={cut.pp} * {cut.stages} a rank are {stages} stages"
    else:
        rule = f"adds up to {sum(given)}, but model.layers={layers}"

    def cures() -> list[Stream]:
        shown = cut.pp > 1 and stages <= min(layers, _MOST_STAGES)
        even = tuple(layers // stages + (stage < layers % stages) for stage in range(stages if shown else 0))
        return [Stream([Cure({"parallel.layers_per_stage": counts})]) for counts in dict.fromkeys((even, ()))]

    return Fault("parallel.layers_per_stage", rule, ("model.layers", *_STAGES), cures)


def _micro_batches(cut: Cut) -> Fault | None:
    train = cut.config.train
    a_count = train.micro_batch * cut.dp
    if cut.pp == 1 or train.global_batch % a_count:
        return None
    rule = _schedule_fault(cut)
    if not rule:
        return None
    divisor = "train.micro_batch" if cut.dp == 1 else f"(train.micro_batch * {_ranks(cut)})"
    rule += f"; train.global_batch / {divisor} = {cut.micro_batches}"

    def cures() -> list[Stream]:
        """Other micro-batches and batches near these, and other layouts."""
        now, rounds = cut.micro_batches, cut.micro_batches // cut.pp
        counts = {cut.pp, 2 * cut.pp, rounds * cut.pp, (rounds + 1) * cut.pp, *range(now - 64, now + 65)}
        wholes = [count * a_count for count in counts if count > 0]
        sizes = divisors(train.global_batch // cut.dp)
        batches = [
            *near("train.micro_batch", train.micro_batch, sizes),
            *near("train.global_batch", train.global_batch, wholes),
        ]
        return [*batches, nearest_layouts(cut, 2)] if cut.world > 1 else batches

    return Fault("train.micro_batch", rule, ("train.global_batch", *_HELD, "parallel.vpp", "parallel.schedule"), cures)


def _schedule_fault(cut: Cut) -> str:
    """What a schedule misses in the number of micro-batches; empty: nothing. The others take any number."""
    count, pp, name = cut.micro_batches, cut.pp, cut.schedule
    fewest = {"1f1b": pp, "dualpipev": 2 * pp}.get(name, 1)
    if count < fewest:
        return f"parallel.schedule={name} with parallel.pp={pp} needs at least {fewest} micro-batches a step"
    rounds = max(1, count // pp)
    known = cut.fits or cut.world < cut.held  # otherwise dp, and the count with it, is yet to be found
    if name in ("interleaved", "interleaved_zb") and known and count % rounds:
        return (
            f"parallel.schedule={name} with parallel.pp={pp} runs {count} micro-batches in {rounds} equal rounds, "
            f"so that a step must have a multiple of {rounds}"
        )
    return ""


def _compiled(cut: Cut) -> Fault | None:
    if not (cut.config.train.compile and cut.pp > 1 and cut.kind.splits):
        return None
    rule = f"compiled code cannot split its backward pass, as parallel.schedule={cut.schedule} does"
    cures = [Stream([Cure({"train.compile": False})]), Stream([Cure({"parallel.schedule": "interleaved"})])]
    return Fault("train.compile", rule, _STAGES, lambda: cures)


_RULES: tuple[Rule, ...] = (
    _processes, _micro_batch, _batch, _micro_batches, _replicas,
    _shares("model.heads", "model.kv_heads"), _widths("model.ffn"), _widths("model.moe.shared_ffn"),
    _shares("model.vocab_multiple", mend=_padding), *CONTEXT_RULES,
    _idle_schedule, _stages_a_rank, _layers, _given_layers, _compiled, *MOE_RULES,
)  # fmt: skip
