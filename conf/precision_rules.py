"""Rules of number formats: settings that nothing would read, and models of which nothing would be in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from math import frexp

from conf.problem import Problem, show
from conf.schema import Config
from parallel.precision import FP8Config, LossScaleConfig
from parallel.schedules import SCHEDULES, schedule_name, stages_per_rank

_DELAYED = ("margin", "history", "amax")
_PER_TENSOR = ("fp8_delayed", "fp8_current")


def _products(config: Config) -> Iterator[Problem]:
    name, matmul = config.precision.name, config.precision.matmul
    if name != "fp32" and matmul != "auto":
        rule = f"says how fp32 products are made, but precision.name={name}"
        fix = "leave it out, or write precision=fp32"
        yield Problem("precision.matmul", matmul, rule, fix, ("precision.name",))


def _idle(config: Config) -> Iterator[Problem]:
    """Settings of a format that the run does not use."""
    precision = config.precision
    usual = {"fp16": LossScaleConfig(), "fp8": FP8Config()}
    used = {"fp16": precision.name == "fp16", "fp8": precision.in_fp8}
    meant = {"fp16": "precision=fp16", "fp8": "precision=fp8_delayed"}
    for section, default in usual.items():
        given = getattr(precision, section)
        for each in fields(given):
            value, plain = getattr(given, each.name), getattr(default, each.name)
            needs = meant[section] if not used[section] else _wanted(each.name, precision.name)
            if value == plain or needs is None:
                continue
            rule = f"is not read under precision.name={precision.name}"
            fix = f"leave it out, or write {needs}"
            yield Problem(f"precision.{section}.{each.name}", show(value), rule, fix, ("precision.name",))


def _wanted(field: str, name: str) -> str | None:
    """The recipe that reads a field of FP8, where this one does not."""
    if field in _DELAYED and name != "fp8_delayed":
        return "precision=fp8_delayed"
    if field == "format" and name not in _PER_TENSOR:
        return "precision=fp8_current"
    return None


def _no_experts(config: Config) -> Iterator[Problem]:
    if config.precision.in_fp8 and not config.precision.fp8.experts and config.model.moe is None:
        rule = "is not read: the model has no experts (model.moe is null)"
        yield Problem("precision.fp8.experts", "false", rule, "leave it out", ("model.moe",))


def _scale(config: Config) -> Iterator[Problem]:
    scale = config.precision.fp16
    for name in ("initial", "least"):
        value = getattr(scale, name)
        if frexp(value)[0] != 0.5:
            rule = "must be a power of two, so that scaling a gradient rounds nothing"
            below = 2.0 ** (frexp(value)[1] - 1)
            fix = f"write precision.fp16.{name}={show(below)} or precision.fp16.{name}={show(2 * below)}"
            yield Problem(f"precision.fp16.{name}", show(value), rule, fix)
    if scale.least > scale.initial:
        rule = f"must be at most precision.fp16.initial={show(scale.initial)}"
        fix = f"write precision.fp16.least={show(scale.initial)}"
        yield Problem("precision.fp16.least", show(scale.least), rule, fix, ("precision.fp16.initial",))


def _something(config: Config) -> Iterator[Problem]:
    """At least one product is in FP8."""
    fp8, layers = config.precision.fp8, config.model.layers
    if not config.precision.in_fp8:
        return
    first, last = fp8.first_bf16, fp8.last_bf16
    if first + last >= layers:
        (key, value), (other, rest) = sorted(
            (("precision.fp8.first_bf16", first), ("precision.fp8.last_bf16", last)), key=lambda each: each[1] == 0
        )
        rule = f"with {other}={rest} it leaves none of the model.layers={layers} blocks in FP8"
        fix = f"write {key}=0 {other}=0, or precision=bf16"
        yield Problem(key, str(value), rule, fix, (other, "model.layers", "precision.name"))
        return
    moe, sparse = config.model.moe, _sparse(config)
    shared = moe is not None and moe.shared_ffn > 0
    dense = fp8.mlp and (shared or not all(sparse))
    if not (fp8.attention or dense or (fp8.experts and any(sparse))):
        rule = "no linear of the model is in FP8: attention is not, nor are its MLPs or experts"
        others = ("precision.fp8.mlp", "precision.fp8.experts", "model.moe", "precision.name")
        yield Problem("precision.fp8.attention", "false", rule, "write precision.fp8.attention=true", others)


def _sparse(config: Config) -> list[bool]:
    """Of each block with linears in FP8, whether it has experts."""
    fp8, moe = config.precision.fp8, config.model.moe
    inside = range(fp8.first_bf16, config.model.layers - fp8.last_bf16)
    return [moe is not None and moe.is_sparse(n) for n in inside]


def _beyond_te(config: Config) -> Iterator[Problem]:
    """What Transformer Engine cannot do, or not as the emulation does it (parallel/fp8/te.py says why)."""
    parallel, schedule = config.parallel, schedule_name(config.parallel)
    emulated, also = "precision.fp8.backend=emulate", ("precision.fp8.backend", "precision.name")
    if parallel.zero == 3:
        rule = "frees weights between micro-batches, but Transformer Engine keeps its rounded copies of all of them"
        yield Problem("parallel.zero", "3", rule, f"write parallel.zero=2, or {emulated}", also)
    if parallel.pp > 1 and SCHEDULES[schedule].splits:
        rule = "makes gradients of weights later, where Transformer Engine replaces a sum of micro-batches by the last"
        fix = f"write parallel.schedule=interleaved, or {emulated}"
        yield Problem("parallel.schedule", schedule, rule, fix, (*also, "parallel.pp"))
    elif config.precision.name == "fp8_delayed" and stages_per_rank(parallel) > 1:
        rule = "at the end of a stage's pass Transformer Engine moves on the histories of all stages of the process"
        fix = f"write parallel.vpp=1 parallel.schedule=1f1b, or precision=fp8_current, or {emulated}"
        yield Problem("parallel.vpp", show(parallel.vpp), rule, fix, (*also, "parallel.pp", "parallel.schedule"))
    if config.precision.fp8.experts and any(_sparse(config)):
        rule = "Transformer Engine wants a parameter for each expert, but theirs are one, whatever the layout"
        fix = f"write precision.fp8.experts=false, which leaves them in bf16, or {emulated}"
        yield Problem("precision.fp8.experts", "true", rule, fix, (*also, "model.moe"))
    yield from _uneven(config)


def _uneven(config: Config) -> Iterator[Problem]:
    """Sizes of a rank's products that Transformer Engine does not take."""
    model, parallel, train, moe = config.model, config.parallel, config.train, config.model.moe
    step, fp8 = 32 if config.precision.name == "mxfp8" else 16, config.precision.fp8
    head = model.head_dim or model.hidden // model.heads
    sizes = [("train.micro_batch", train.micro_batch, train.micro_batch * train.seq_len // parallel.cp)]
    sizes += [("model.hidden", model.hidden, model.hidden)]
    if fp8.attention:
        groups = (model.heads + 2 * model.kv_heads) * head // parallel.tp
        sizes += [("model.heads", model.heads, model.heads * head // parallel.tp)]
        sizes += [("model.kv_heads", model.kv_heads, groups)]
    if fp8.mlp:
        sizes += [("model.ffn", model.ffn, model.ffn // parallel.tp)] if not all(_sparse(config)) else []
        sizes += [("model.moe.shared_ffn", moe.shared_ffn, moe.shared_ffn // parallel.tp)] if moe else []
    for key, value, size in sizes:
        if size % step:
            rule = f"gives a rank products of size {size}, and Transformer Engine wants multiples of {step}"
            fix = "change it, or parallel.tp; or write precision.fp8.backend=emulate"
            yield Problem(key, show(value), rule, fix, ("precision.fp8.backend", "precision.name", "parallel.tp"))


def te_obstacle(config: Config) -> str | None:
    """Why Transformer Engine cannot make this run's products in FP8, if it cannot on any device."""
    problem = next(_beyond_te(config), None)
    return f"{problem.key}={problem.value}: {problem.rule}" if problem else None


def _compiled(config: Config) -> Iterator[Problem]:
    if config.precision.in_fp8 and config.train.compile:
        rule = f"FP8's products are not made for compiled blocks, and precision={config.precision.name} has them"
        yield Problem(
            "train.compile", "true", rule, "write train.compile=false, or precision=bf16", ("precision.name",)
        )


def _te(config: Config) -> Iterator[Problem]:
    """What goes against Transformer Engine where it is asked for."""
    if config.precision.in_fp8 and config.precision.fp8.backend == "te":
        yield from _beyond_te(config)


PRECISION_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _products, _idle, _no_experts, _scale, _something, _compiled, _te,
)  # fmt: skip
"""In the order of the schema."""
