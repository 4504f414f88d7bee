"""Rules that several settings keep together, one small function a subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.data_rules import DATA_RULES
from conf.precision_rules import PRECISION_RULES
from conf.problem import Problem, show
from conf.resolve import total_steps
from conf.safety_rules import SAFETY_RULES
from conf.schema import Config
from conf.suggest import looks_secret

_LONGEST_NAME = 120
_WANDB_FORBIDDEN = set("/\\#?%:")


def rule_problems(config: Config) -> list[Problem]:
    """The broken rules of several keys, in the order of the schema."""
    return [problem for rule in _RULES for problem in rule(config)]


def _names(config: Config) -> Iterator[Problem]:
    given = {"run.name": config.run.name, "model.name": config.model.name, "data.name": config.data.name}
    for key, name in given.items():
        fault = _name_fault(name) if name is not None else None
        if name is not None and fault is not None:
            cleaned = re.sub(r"[^\w.+=,@-]+", "-", name).strip("-.")[:60] or "mine"
            yield Problem(key, show(name), f"names a folder: {fault}", f"write {key}={cleaned}")
    if not config.run.dir.strip() or "\0" in config.run.dir:
        yield Problem("run.dir", show(config.run.dir), "must be a folder's path", "write run.dir=runs")
    elif Path(config.run.dir).expanduser().is_file():
        yield Problem("run.dir", config.run.dir, "is a file, but must be a folder", "name another folder")


def _name_fault(name: str) -> str | None:
    """Why a name cannot be a folder's, if it cannot."""
    cases = (
        (name.strip() == "", "it must not be empty"),
        (name in (".", ".."), "it must not be . or .."),
        (name != name.strip(), "it must not begin or end with a space"),
        ("/" in name or "\\" in name, "it must hold no / or \\"),
        (not name.isprintable(), "it must hold printable characters only"),
        (len(name.encode("utf-8", "replace")) > _LONGEST_NAME, f"it must have at most {_LONGEST_NAME} bytes"),
    )
    return next((fault for wrong, fault in cases if wrong), None)


def _length(config: Config) -> Iterator[Problem]:
    train = config.train
    pair = ("train.steps", "train.tokens")
    if train.steps is None and train.tokens is None:
        rule = "a run needs exactly one of train.steps and train.tokens"
        yield Problem("train.steps", "null", rule, "write train.steps=200", pair)
        return
    if train.steps is not None and train.tokens is not None:
        rule = f"train.tokens={train.tokens} is given too, but exactly one of the two says how long a run is"
        yield Problem("train.steps", show(train.steps), rule, "leave out one of the two", pair)
        return
    a_step, total = train.global_batch * train.seq_len, total_steps(config)
    reads = ("train.tokens", "train.global_batch", "train.seq_len")
    if total < 1:
        rule = f"must be at least one step: train.global_batch * train.seq_len = {a_step} tokens"
        yield Problem("train.tokens", show(train.tokens), rule, f"write train.tokens={a_step}", reads)
        return
    if train.stop_at is not None and train.stop_at > total:
        rule = f"must be from 1 to the run's {total} steps"
        fix = f"write train.stop_at={total}, or lengthen the run with train.steps={train.stop_at}"
        yield Problem("train.stop_at", show(train.stop_at), rule, fix, (*pair, *reads))
    warmup = config.lr_schedule.warmup
    if warmup is not None and warmup >= total:
        rule = f"the warm-up must be shorter than the run's {total} steps"
        fix = f"write lr_schedule.warmup={total // 10}, or leave it null; or lengthen the run"
        yield Problem("lr_schedule.warmup", show(warmup), rule, fix, (*pair, *reads))


def _decay(config: Config) -> Iterator[Problem]:
    schedule, total = config.lr_schedule, total_steps(config)
    warmup = schedule.warmup if schedule.warmup is not None else 0
    if schedule.name != "wsd" or total < 1 or warmup + schedule.decay_share * total <= total:
        return
    rule = f"the last {schedule.decay_share:.0%} of {total} steps decay, and {warmup} steps of warm-up reach into them"
    fix = f"write lr_schedule.decay_share={(total - warmup) / total:.2g} or less, or a shorter lr_schedule.warmup"
    yield Problem(
        "lr_schedule.decay_share", show(schedule.decay_share), rule, fix, ("lr_schedule.warmup", "train.steps")
    )


def _heads(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.heads % model.kv_heads:
        fits = [str(count) for count in range(1, model.heads + 1) if model.heads % count == 0]
        rule = f"model.heads={model.heads} must be a multiple of it"
        yield Problem("model.kv_heads", show(model.kv_heads), rule, f"write one of {', '.join(fits)}", ("model.heads",))
    if model.head_dim is not None:
        if model.head_dim % 2:
            rule, fix = (
                "must be even: rotary embedding turns pairs",
                f"write model.head_dim={model.head_dim + 1}",
            )
            yield Problem("model.head_dim", show(model.head_dim), rule, fix)
        return
    if model.hidden % (2 * model.heads):
        nearest = max(1, round(model.hidden / (2 * model.heads))) * 2 * model.heads
        rule = f"must be an even multiple of model.heads={model.heads} while model.head_dim is null"
        fix = f"write model.hidden={nearest}, or give model.head_dim"
        yield Problem("model.hidden", show(model.hidden), rule, fix, ("model.heads", "model.head_dim"))


def _rope(config: Config) -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        key = "model.rope_scaling.low_freq_factor"
        rule = f"must be below model.rope_scaling.high_freq_factor={scaling.high_freq_factor}"
        also = ("model.rope_scaling.high_freq_factor",)
        yield Problem(key, show(scaling.low_freq_factor), rule, f"write {key}=1.0 (the default)", also)


def _reports(config: Config) -> Iterator[Problem]:
    project = config.metrics.wandb_project
    if not project.strip() or len(project) > 128 or _WANDB_FORBIDDEN & set(project):
        rule = "W&B takes 1 to 128 characters, without / \\ # ? % :"
        yield Problem("metrics.wandb_project", show(project), rule, "write metrics.wandb_project=tatara")
    for tag in config.metrics.wandb_tags:
        if not 1 <= len(tag) <= 64:
            rule = f"W&B takes tags of 1 to 64 characters; one has {len(tag)}"
            yield Problem("metrics.wandb_tags", show(config.metrics.wandb_tags), rule, "shorten it")


def _secrets(config: Config) -> Iterator[Problem]:
    for key in _secret_keys("extra", config.extra):
        rule = "looks like a secret, and every setting is written into the run's files"
        yield Problem(key, "(not shown)", rule, "keep it in the environment, or give the note another name")


def _secret_keys(prefix: str, notes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in notes.items():
        key = f"{prefix}.{name}"
        if looks_secret(name):
            yield key
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield from _secret_keys(key, item)


_RULES: Sequence[Callable[[Config], Iterator[Problem]]] = (
    _names, _length, _decay, _heads, _rope, *DATA_RULES, *PRECISION_RULES,
    *SAFETY_RULES, _reports, _secrets,
)  # fmt: skip
