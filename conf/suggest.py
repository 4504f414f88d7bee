"""What the writer of an unknown word probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from conf.problem import Problem
from conf.tree import Leaf

# What other programs have under these names, and a look-alike here would be wrong advice.
_ABSENT = {
    "parallel.dp": (
        "what tp, pp and cp leave of the processes is data parallelism, dp = processes / (tp * pp * cp)",
        "start as many processes as it takes",
    ),
}
_ELSEWHERE = {
    "activation_checkpointing": "train.recompute",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "batch_size": "train.global_batch",
    "block_size": "train.seq_len",
    "context_parallel_degree": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "data_parallel_replicate_degree": "parallel.replicate",
    "dim": "model.hidden",
    "eval_interval": "train.eval_every",
    "expert_model_parallel_size": "parallel.ep",
    "expert_parallel_degree": "parallel.ep",
    "first_k_dense_replace": "model.moe.first_dense",
    "global_batch_size": "train.global_batch",
    "grad_clip": "optim.clip",
    "hidden_size": "model.hidden",
    "learning_rate": "optim.lr",
    "log_interval": "metrics.every",
    "max_iters": "train.steps",
    "max_steps": "train.steps",
    "micro_batch_size": "train.micro_batch",
    "moe_ffn_hidden_size": "model.moe.ffn",
    "moe_intermediate_size": "model.moe.ffn",
    "moe_router_topk": "model.moe.top_k",
    "n_embd": "model.hidden",
    "n_head": "model.heads",
    "n_layer": "model.layers",
    "n_routed_experts": "model.moe.experts",
    "norm_topk_prob": "model.moe.renormalize",
    "num_attention_heads": "model.heads",
    "num_experts": "model.moe.experts",
    "num_experts_per_tok": "model.moe.top_k",
    "num_hidden_layers": "model.layers",
    "num_layers": "model.layers",
    "num_local_experts": "model.moe.experts",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "recompute_granularity": "train.recompute",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "sequence_length": "train.seq_len",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "warmup_steps": "lr_schedule.warmup",
}
"""Names that other trainers use for the same thing."""
_SECRET_WORDS = {
    "apikey", "credential", "credentials", "key", "passphrase", "passwd", "password", "passwords", "pwd",
    "secret", "secrets", "token",
}  # fmt: skip


def close(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Known words that look like this one, best first; case does not matter."""
    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    return [by_lower[match] for match in get_close_matches(word.lower(), by_lower, count, cutoff=0.6)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean X?`, or nothing."""
    found = close(word, known)
    return f"did you mean {found[0]}?" if found else ""


def likely_keys(key: str, known: Mapping[str, Leaf]) -> list[str]:
    """What an unknown key may stand for, best first: same last word, known elsewhere, look-alikes."""
    last = key.replace("/", ".").rsplit(".", 1)[-1]
    dotted = key.replace("/", ".")
    if dotted in known:
        return [dotted]
    same_last = [each for each in known if each.rsplit(".", 1)[-1] == last]
    if same_last:
        return sorted(same_last, key=lambda each: -_shared(each, dotted))[:3]
    if last.lower() in _ELSEWHERE and _ELSEWHERE[last.lower()] in known:
        return [_ELSEWHERE[last.lower()]]
    whole = [*known, *dict.fromkeys(each.split(".", 1)[0] for each in known)]
    found = close(dotted, whole) if "." in dotted else close(dotted, [e for e in whole if "." not in e])
    if found:
        return found
    lasts = {each.rsplit(".", 1)[-1]: each for each in reversed(list(known))}
    return [lasts[match] for match in close(last, lasts)]


def _shared(known: str, asked: str) -> int:
    """How many leading words two keys share, near misses counted."""
    head = asked.split(".", 1)[0]
    return int(head == known.split(".", 1)[0]) * 2 + int(bool(close(head, [known.split(".", 1)[0]])))


def looks_secret(name: str) -> bool:
    """Whether a key's name says that its value must not be shown or written anywhere."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return bool(_SECRET_WORDS & set(re.split(r"[\W_]+", spaced.lower())))


def unknown_key(key: str, value: str | None, known: Mapping[str, Leaf]) -> Problem:
    """The problem of a key that the schema does not have."""
    if key in _ABSENT:
        rule, fix = _ABSENT[key]
        return Problem(key, value, f"unknown key `{key}`: {rule}", fix)
    likely = likely_keys(key, known)
    value = "(not shown)" if value is not None and looks_secret(key) else value
    rule = f"unknown key `{key}`"
    if likely:
        rule += "; did you mean " + " or ".join(f"`{each}`" for each in likely) + "?"
        shown = value if value not in (None, "(not shown)") else "VALUE"
        fix = f"write {likely[0]}={shown}" if likely[0] in known else f"use the keys of {likely[0]}"
    else:
        head = key.split(".", 1)[0]
        siblings = [each for each in known if each.startswith(head + ".")]
        fix = f"the keys of {head}: {', '.join(siblings)}" if siblings else "see --help for every key"
        fix += "; a note of your own goes under extra: +extra.NAME=VALUE"
    return Problem(key, value, rule, fix)
