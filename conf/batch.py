"""The micro-batch that train.micro_batch=0 stands for."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import gcd

from conf.schema import Config
from parallel.schedules import schedule_name

MOST_TOKENS = 8192
"""Tokens of a chosen micro-batch on a rank at most (one sequence, or its part there, may be longer)."""

_FED = 4  # micro-batches for each pipeline rank that leave a bubble of a fifth at most
_FULL = 1024  # tokens on a rank below which a micro-batch is too small to be made smaller for that


def with_micro_batch(config: Config, world: int) -> Config:
    """The configuration with its micro-batch chosen, where that is left to us."""
    if config.train.micro_batch != 0:
        return config
    return replace(config, train=replace(config.train, micro_batch=chosen_micro_batch(config, world)))


def chosen_micro_batch(config: Config, world: int) -> int:
    """The largest of at most MOST_TOKENS that shares a step out evenly.

    In a pipeline it leaves enough micro-batches to keep all stages busy, as long as each is still worth a product.
    1 where nothing fits: the rules then say what is in the way.
    """
    train, parallel = config.train, config.parallel
    if min(train.global_batch, train.seq_len, parallel.pp, parallel.tp, parallel.cp) < 1:
        return 1
    dp = max(1, world // (parallel.pp * parallel.tp * parallel.cp))
    whole = gcd(train.global_batch, *(max(1, portion.global_batch) for portion in train.batch_ramp))
    own, length = whole // dp, max(1, train.seq_len // parallel.cp)  # the part of a sequence on a rank
    least = parallel.pp * (2 if schedule_name(parallel) == "dualpipev" else 1)
    most = max(1, min(own, MOST_TOKENS // length))
    even = [
        size for size in range(most, 0, -1)
        if own % size == 0 and own // size % parallel.pp == 0 and size * length % parallel.tp == 0
    ]  # fmt: skip
    fed = (s for s in even if own // s >= _FED * parallel.pp and s * length >= _FULL)
    enough = (s for s in even if own // s >= least)
    return next(chain(fed if parallel.pp > 1 else (), enough), 1)
