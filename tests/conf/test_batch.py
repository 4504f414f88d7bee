"""The micro-batch that is chosen."""

import pytest

from conf.compose import compose
from conf.validate import problems

CHOSEN = [
    (1, [], 8), (2, [], 4), (4, [], 2), (8, [], 1),
    (2, ["parallel.tp=2"], 8), (4, ["parallel.tp=2", "parallel.pp=2"], 4), (8, ["parallel.tp=2", "parallel.pp=2"], 2),
    (2, ["parallel.pp=2", "train.global_batch=64"], 8), (4, ["parallel.pp=4"], 2),
    (2, ["parallel.pp=2", "parallel.schedule=dualpipev"], 2),
    (1, ["train.global_batch=1024"], 32), (1, ["train.global_batch=6", "train.seq_len=16384"], 1),
    (2, ["train.micro_batch=1"], 1), (2, ["parallel.cp=2"], 8), (8, ["parallel.cp=2", "parallel.tp=2"], 4),
    (2, ["parallel.cp=2", "train.global_batch=1024"], 64),
    (4, ["parallel.cp=2", "parallel.tp=2", "train.seq_len=4"], 8), (2, ["model=moe_nano", "parallel.ep=2"], 4),
    (4, ["parallel.cp=4", "train.seq_len=65536", "train.steps=1"], 1),
]  # fmt: skip


@pytest.mark.parametrize("world, overrides, size", CHOSEN)
def test_the_largest_micro_batch_that_the_layout_allows_is_chosen(world, overrides, size):
    config = compose(overrides, world=world, here=False)
    assert config.train.micro_batch == size
    assert problems(config, world=world, here=False) == []
