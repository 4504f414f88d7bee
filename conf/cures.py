"""Where cures of a cut are sought: values near a key's, other layouts, other numbers of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import gcd, isqrt, log2

from conf.cut import Cure, Cut, Stream

_SMALLER = 6
"""Smaller micro-batches that are tried with another layout."""
_MOST_STAGES = 1024
"""Pipeline ranks that are proposed at most."""
_MOST_CP = 12
"""Degrees of context parallelism that are proposed at most."""


def near(key: str, value: int, candidates: Iterable[int]) -> list[Stream]:
    """The nearest lower and the nearest higher value of a key."""
    ordered = sorted(set(candidates))
    lower = [Cure({key: each}) for each in reversed(ordered) if each < value]
    return [Stream(lower), Stream([Cure({key: each}) for each in ordered if each > value])]


def just(key: str, *values: object) -> Stream:
    """The first of these values that works."""
    return Stream([Cure({key: value}) for value in values])


def nearest_layouts(cut: Cut, most: int = 3) -> Stream:
    """tp and pp, and cp where there is one, that suit the model and the processes.

    The nearest first, by the factors between them and the asked ones.
    """
    asked = (cut.tp, cut.pp, cut.cp)

    def distance(layout: tuple[int, int, int]) -> tuple[float, int]:
        tp, pp, cp = layout
        factors = (abs(log2(new / old)) for new, old in zip(layout, asked, strict=True))
        return sum(factors), -tp * pp * cp

    def possible(layout: tuple[int, int, int]) -> bool:
        # One process stands for any number: it has not been started as it was meant.
        tp, pp, cp = layout
        suits = cut.world % (tp * pp * cp) == 0 if cut.world > 1 else tp * pp * cp <= cut.held
        return suits and layout != asked

    layouts = filter(possible, product(divisors(cut.shared), _stages(cut), _contexts(cut)))
    return Stream((_layout(cut, layout) for layout in sorted(layouts, key=distance)), most)


def _stages(cut: Cut) -> list[int]:
    most = min(cut.config.model.layers, cut.world if cut.world > 1 else cut.pp, _MOST_STAGES)
    return [count for count in range(1, most + 1) if cut.world == 1 or cut.world % count == 0]


def _contexts(cut: Cut) -> list[int]:
    """Degrees of context parallelism that suit the sequences, where it was asked for at all."""
    if cut.cp == 1:
        return [1]
    parts = [count for count in divisors(cut.world if cut.world > 1 else cut.cp) if count <= 2 * cut.cp]
    return [count for count in parts if count == 1 or cut.config.train.seq_len % (2 * count) == 0][-_MOST_CP:] or [1]


def _layout(cut: Cut, layout: tuple[int, int, int]) -> Cure:
    """A layout, with smaller micro-batches and fewer ranks to share the experts where it needs them."""
    tp, pp, cp = layout
    moved = {"parallel.tp": tp, "parallel.pp": pp} | ({"parallel.cp": cp} if cut.cp > 1 else {})
    other, train = cut.cured(Cure(moved)), cut.config.train
    if cut.moe is not None and other.fits and other.expert_room % cut.ep:
        moved |= {"parallel.ep": max(d for d in divisors(gcd(cut.moe.experts, other.expert_room)) if d <= cut.ep)}
    parts = divisors(train.global_batch // other.dp) if train.global_batch % other.dp == 0 else []
    smaller = [part for part in reversed(parts) if part < train.micro_batch][:_SMALLER]
    return Cure(moved, instead=tuple(Cure({**moved, "train.micro_batch": part}) for part in smaller))


def starts(cut: Cut) -> list[Stream]:
    """The nearest numbers of processes that make whole models, if the model can be cut so; from one, the least."""
    if not cut.suits:
        return []
    whole = cut.world // cut.held
    higher = Stream(_processes(cut, range(whole + 1, whole + 65)))
    return [higher] if cut.world == 1 else [Stream(_processes(cut, range(min(whole, cut.world), 0, -1))), higher]


def _processes(cut: Cut, models: Iterable[int]) -> Iterator[Cure]:
    return (Cure(processes=count * cut.held) for count in models if count * cut.held != cut.world)


def multiples(count: int, of: int) -> list[int]:
    """Multiples on both sides of a count, unless it is less than one."""
    return [count // of * of, (count // of + 1) * of] if of <= count else []


def divisors(number: int) -> list[int]:
    """Ascending; of an absurdly large number, those with a factor below 20,000."""
    small = [each for each in range(1, min(isqrt(number), 20_000) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
