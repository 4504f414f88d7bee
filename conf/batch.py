"""The micro-batch that train.micro_batch=0 stands for."""

from __future__ import annotations

from dataclasses import replace

from conf.schema import Config
from parallel.schedules import schedule_name

MOST_TOKENS = 8192
"""Tokens of a chosen micro-batch at most (one sequence may be longer)."""


def with_micro_batch(config: Config, world: int) -> Config:
    """The configuration with its micro-batch chosen, where that is left to us."""
    if config.train.micro_batch != 0:
        return config
    return replace(config, train=replace(config.train, micro_batch=chosen_micro_batch(config, world)))


def chosen_micro_batch(config: Config, world: int) -> int:
    """The largest of at most MOST_TOKENS that shares a step out evenly and keeps a pipeline fed.

    1 where nothing fits: the rules then say what is in the way.
    """
    train, parallel = config.train, config.parallel
    if min(train.global_batch, train.seq_len, parallel.pp, parallel.tp) < 1:
        return 1
    dp = max(1, world // (parallel.pp * parallel.tp))
    own = train.global_batch // dp
    least = parallel.pp * (2 if schedule_name(parallel) == "dualpipev" else 1)
    for size in range(max(1, min(own, MOST_TOKENS // train.seq_len)), 1, -1):
        count, left = divmod(own, size)
        if left == 0 and count >= least and count % parallel.pp == 0 and size * train.seq_len % parallel.tp == 0:
            return size
    return 1
