"""A configuration made small, its structure kept: what a proof of a layout runs on a laptop."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from conf.schema import Config
from model.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.schedules import stages_per_rank

_HEAD_DIM, _GROUP, _SEQ_LEN, _VOCABULARY, _BATCHES = 8, 4, 48, 250, 4


def shrink(config: Config, world: int, steps: int, precision: Literal["fp64", "fp32", "bf16"]) -> Config:
    """The configuration with few layers, narrow ones, short sequences and a small vocabulary.

    Kept are: the cut over processes, the kind of every part (grouped heads, up to four to a group, biases, norms,
    ties, windows, masks, recomputation, compilation), the optimizer, the schedule of the learning rate, and that
    there are several micro-batches, of several sequences where they are.
    """
    parallel = _fewer_layers_a_stage(config.parallel)
    model = _narrow(config.model, config.parallel)
    tp = config.parallel.tp
    seq_len = max(tp, min(config.train.seq_len, _SEQ_LEN * tp) // tp * tp)
    window = config.model.window
    if window is not None:
        model = replace(model, window=max(2, window * seq_len // config.train.seq_len))
    dp = max(1, world // (parallel.tp * parallel.pp))
    micro_batches, rows = _micro_batches(config, dp), min(config.train.micro_batch, 2)
    train = replace(
        config.train, steps=steps, tokens=None, stop_at=None, seq_len=seq_len, micro_batch=rows,
        global_batch=micro_batches * rows * dp, threads=1, device="cpu",
    )  # fmt: skip
    return replace(
        config, train=train, model=replace(model, loss_chunk=max(1, seq_len // 2)), parallel=parallel,
        precision=replace(config.precision, name=precision, matmul="auto"),
        lr_schedule=replace(config.lr_schedule, warmup=None),
    )  # fmt: skip


def _narrow(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Fewer and smaller heads, in the same groups; a prime number of features for the MLP on each rank."""
    tp, stages = parallel.tp, parallel.pp * stages_per_rank(parallel)
    kv_heads = min(model.kv_heads, 2 * tp)
    heads = kv_heads * min(model.heads // model.kv_heads, _GROUP)
    layers = sum(_fewer_layers_a_stage(parallel).layers_per_stage) or min(model.layers, max(2, stages + 1))
    head_dim = model.head_dim or model.hidden // model.heads
    wider = model.hidden > model.heads * head_dim  # as some models are
    hidden = heads * _HEAD_DIM * (2 if wider else 1)
    return replace(
        model, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=_HEAD_DIM, hidden=hidden,
        ffn=min(model.ffn, 29 * tp), vocab_size=min(model.vocab_size or _VOCABULARY, _VOCABULARY),
    )  # fmt: skip


def _fewer_layers_a_stage(parallel: ParallelConfig) -> ParallelConfig:
    """Stages of one or two layers, longer ones longer still."""
    counts = parallel.layers_per_stage
    few = tuple(1 + (count > min(counts)) for count in counts)
    return replace(parallel, layers_per_stage=few)


def _micro_batches(config: Config, dp: int) -> int:
    """Micro-batches a rank: as configured where these are few, else as many as the pipeline needs, at least four."""
    own = config.train.global_batch // (config.train.micro_batch * dp)
    needed = max(_BATCHES, 2 * config.parallel.pp)
    return min(own, needed) if config.parallel.pp == 1 or own < needed else needed
