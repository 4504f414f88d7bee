"""A configuration made small, its structure kept: what a proof of a layout runs on a laptop."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from conf.cures import divisors
from conf.schema import Config
from model.config import ModelConfig, MoEConfig
from parallel.config import ParallelConfig
from parallel.precision import PrecisionName
from parallel.schedules import stages_per_rank

_HEAD_DIM, _GROUP, _SEQ_LEN, _VOCABULARY, _BATCHES = 8, 4, 48, 250, 4
_EXPERTS, _EXPERT_GROUPS, _TOP_K, _EXPERT_FFN, _SHARED_FFN = 6, 4, 3, 24, 13


def shrink(config: Config, world: int, steps: int, precision: PrecisionName) -> Config:
    """The configuration with few layers, narrow ones, short sequences and a small vocabulary.

    Kept are: the cut over processes, the kind of every part (grouped heads, up to four to a group, biases, norms,
    ties, windows, masks, experts and how they are chosen, recomputation, compilation), the optimizer, the schedule
    of the learning rate, and that there are several micro-batches, of several sequences where they are.
    """
    parallel = _fewer_layers_a_stage(config.parallel)
    model = _narrow(config.model, config.parallel)
    seq_len = _length(config)
    window = config.model.window
    if window is not None:
        model = replace(model, window=max(2, window * seq_len // config.train.seq_len))
    dp = max(1, world // (parallel.tp * parallel.pp * parallel.cp))
    micro_batches, rows = _micro_batches(config, dp), min(config.train.micro_batch, 2)
    train = replace(
        config.train, steps=steps, tokens=None, stop_at=None, seq_len=seq_len, micro_batch=rows,
        global_batch=micro_batches * rows * dp, batch_ramp=(), skip_steps=(), threads=1, device="cpu",
    )  # fmt: skip
    return replace(
        config, train=train, model=replace(model, loss_chunk=max(1, seq_len // (2 * parallel.cp))), parallel=parallel,
        precision=replace(config.precision, name=precision, matmul="auto"),
        lr_schedule=replace(config.lr_schedule, warmup=None),
    )  # fmt: skip


def _length(config: Config) -> int:
    """Tokens of a sequence: the ranks that share it, by chunks (cp) and by tokens (tp), have equal parts."""
    tp, cp = config.parallel.tp, config.parallel.cp
    step = tp if cp == 1 else cp * lcm(2, tp)
    return max(step, min(config.train.seq_len, _SEQ_LEN * max(tp, cp)) // step * step)


def _narrow(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Fewer and smaller heads, in the same groups; a prime number of features for each MLP on each rank."""
    tp, stages = parallel.tp, parallel.pp * stages_per_rank(parallel)
    kv_heads = min(model.kv_heads, 2 * tp)
    heads = kv_heads * min(model.heads // model.kv_heads, _GROUP)
    moe = None if model.moe is None else _few_experts(model.moe, parallel)
    fewest = 2 if moe is None else moe.first_dense + moe.every + 1  # so that a sparse block follows a dense one
    layers = sum(_fewer_layers_a_stage(parallel).layers_per_stage) or min(model.layers, max(fewest, stages + 1))
    head_dim = model.head_dim or model.hidden // model.heads
    wider = model.hidden > model.heads * head_dim  # as some models are
    hidden = heads * _HEAD_DIM * (2 if wider else 1)
    return replace(
        model, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=_HEAD_DIM, hidden=hidden,
        ffn=min(model.ffn, 29 * tp), moe=moe, vocab_size=min(model.vocab_size or _VOCABULARY, _VOCABULARY),
    )  # fmt: skip


def _few_experts(moe: MoEConfig, parallel: ParallelConfig) -> MoEConfig:
    """At least two a rank where there are, in as many groups or fewer; up to three for a token, never all."""
    groups = max((count for count in divisors(moe.groups) if 1 < count <= _EXPERT_GROUPS), default=moe.groups)
    chosen = groups if moe.groups_chosen == moe.groups else min(moe.groups_chosen, max(1, groups - 1))
    top_k = min(moe.top_k, _TOP_K)
    least = max(2 * parallel.ep, 2 * groups, _EXPERTS, -(-top_k * groups // chosen))
    counts = range(lcm(parallel.ep, groups), moe.experts, lcm(parallel.ep, groups))
    return replace(
        moe, experts=next((count for count in counts if count >= least), moe.experts), top_k=top_k, groups=groups,
        groups_chosen=chosen, ffn=min(moe.ffn, _EXPERT_FFN), shared_ffn=min(moe.shared_ffn, _SHARED_FFN * parallel.tp),
        first_dense=min(moe.first_dense, 1),
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
