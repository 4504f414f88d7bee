"""Rules of what ranks share of sequences (tp and cp), and of what they share of the experts (ep)."""

from __future__ import annotations

from math import gcd, lcm

from conf.cures import divisors, just, multiples, near, nearest_layouts, starts
from conf.cut import Cut, Fault, Rule, Stream
from model.config import MoEConfig
from parallel.config import ParallelConfig

_HELD = ("parallel.tp", "parallel.pp", "parallel.cp")
_ROOM = (*_HELD, "parallel.zero", "parallel.replicate")


def _chunks(cut: Cut) -> Fault | None:
    if cut.has_chunks:
        return None
    length = cut.config.train.seq_len
    rule = (
        f"each rank takes an early and a late chunk of a sequence, so that all have equal work: "
        f"train.seq_len={length} must be a multiple of 2 * {cut.cp} = {2 * cut.cp}"
    )

    def cures() -> list[Stream]:
        return [nearest_layouts(cut), *near("train.seq_len", length, multiples(length, _length(cut)) or [_length(cut)])]

    return Fault("parallel.cp", rule, ("train.seq_len",), cures)


def _length(cut: Cut) -> int:
    """Tokens that a sequence may have, whatever the micro-batch, and multiples of them."""
    return cut.tp if cut.cp == 1 else cut.cp * lcm(2, cut.tp)


def _tokens(cut: Cut) -> Fault | None:
    train, cp = cut.config.train, cut.cp
    tokens, rest = divmod(train.micro_batch * train.seq_len, cp)
    if rest or tokens % cut.tp == 0:
        return None
    names, numbers = "train.micro_batch * train.seq_len", f"{train.micro_batch} * {train.seq_len}"
    if cp > 1:
        names, numbers = f"{names} / parallel.cp", f"{numbers} / {cp}"
    rule = (
        f"must divide the tokens of a micro-batch, {names} = {numbers} = {tokens}: between its products each rank has "
        "an equal share of them"
    )

    def cures() -> list[Stream]:
        sizes = divisors(train.global_batch // cut.dp) if train.global_batch % cut.dp == 0 else []
        lengths = multiples(train.seq_len, _length(cut))
        micro_batches = near("train.micro_batch", train.micro_batch, sizes)
        return [nearest_layouts(cut), *micro_batches, *near("train.seq_len", train.seq_len, lengths)]

    return Fault("parallel.tp", rule, ("train.micro_batch", "train.seq_len", "parallel.cp"), cures)


def _idle_exchange(cut: Cut) -> Fault | None:
    usual = ParallelConfig().cp_exchange
    if cut.cp > 1 or cut.config.parallel.cp_exchange == usual:
        return None
    rule = "says how the ranks that share a sequence see each other's keys and values, but parallel.cp=1"
    wider = [count for count in divisors(cut.world) if count > 1]
    cures = [just("parallel.cp_exchange", usual), just("parallel.cp", *wider)]
    return Fault("parallel.cp_exchange", rule, ("parallel.cp",), lambda: cures)


def _experts(cut: Cut) -> Fault | None:
    if cut.ep == 1:
        return None
    if cut.moe is None:
        rule = (
            f"shares experts among ranks, but model.moe=null: every block of {cut.config.model.name} is dense "
            "(model=moe_nano has experts)"
        )
        return Fault("parallel.ep", rule, ("model.moe",), lambda: [just("parallel.ep", 1)])
    moe = cut.moe
    rule = _experts_fault(cut, moe)
    also = ("model.moe", "model.moe.experts", *_ROOM)
    return Fault("parallel.ep", rule, also, lambda: _experts_cures(cut, moe)) if rule else None


def _experts_fault(cut: Cut, moe: MoEConfig) -> str:
    """Why the experts cannot be shared so; empty: they can, as far as is known."""
    if moe.experts % cut.ep:
        return f"must divide model.moe.experts={moe.experts}: each rank has as many"
    if not cut.fits or cut.expert_room % cut.ep == 0:
        return ""
    replicas = cut.dp * cut.cp * cut.tp // cut.expert_room
    parts = [f"parallel.{name}={n}" for name, n in (("pp", cut.pp), ("replicate", replicas)) if n > 1]
    origin = f" ({cut.world} processes / {' / '.join(parts)})" if parts else ""
    return f"must divide {cut.expert_room}, the number of processes that may share the experts of a layer{origin}"


def _experts_cures(cut: Cut, moe: MoEConfig) -> list[Stream]:
    room = cut.expert_room if cut.fits else moe.experts
    fewer = near("parallel.ep", cut.ep, divisors(gcd(moe.experts, room)))
    if moe.experts % cut.ep:
        step = lcm(cut.ep, moe.groups)
        return [*fewer, *near("model.moe.experts", moe.experts, multiples(moe.experts, step) or [step])]
    replicas = near("parallel.replicate", cut.config.parallel.replicate, divisors(cut.dp)) if cut.fits else []
    layouts = (cure for cure in nearest_layouts(cut).cures if "parallel.ep" not in cure.settings)
    return [*fewer, *(replicas if cut.config.parallel.zero else []), Stream(layouts, 2), *starts(cut)]


CONTEXT_RULES: tuple[Rule, ...] = (_chunks, _tokens, _idle_exchange, _experts)
