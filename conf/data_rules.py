"""Rules of what a run reads: sources, their mixture, phases, the sizes of its steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isclose

from conf.problem import Problem, show
from conf.resolve import total_steps
from conf.schema import Config
from conf.suggest import did_you_mean
from data.config import SourceConfig

_KINDS = ("prefix", "corpus", "input", "dataset")
_OF_DATASETS = ("subset", "revision", "data_files")
_EXAMPLE = "'data.sources=[{name: web, prefix: PATH}]'"
_WEIGHTS = "{web: 0.7, code: 0.3}"


def _any(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.sources:
        rule = "a run reads at least one source"
        yield Problem("data.sources", "[]", rule, f"write data=stdlib, or data=indexed {_EXAMPLE}")
    if not data.cache.strip():
        yield Problem("data.cache", show(data.cache), "must be a folder's path", "write data.cache=~/.cache/tatara")
    kinds = {_kind(source) for source in data.sources}
    if data.tokenizer is None and "prefix" in kinds and len(kinds) > 1:
        rule = "sources that are prepared here are to get the ids of those that are prepared already"
        yield Problem("data.tokenizer", "null", rule, "name the tokenizer of the prefixes", ("data.sources",))


def _kind(source: SourceConfig) -> str | None:
    """Which key says where a source's tokens come from."""
    given = [key for key in _KINDS if getattr(source, key) is not None]
    return given[0] if len(given) == 1 else None


def _sources(config: Config) -> Iterator[Problem]:
    names = [source.name for source in config.data.sources]
    for index, source in enumerate(config.data.sources):
        here = f"data.sources[{index}]"
        if not re.fullmatch(r"[\w][\w.+-]{0,79}", source.name):
            rule = (
                "must be 1 to 80 letters, digits and _ . + -, the first no sign" if source.name else "must not be empty"
            )
            better = re.sub(r"[^\w.+-]+", "-", source.name).strip("-.+")[:80] or "web"
            yield Problem(f"{here}.name", show(source.name), rule, f"write name: {better}")
        elif source.name in names[:index]:
            rule = f"source {names.index(source.name)} has this name already"
            yield Problem(f"{here}.name", source.name, rule, f"write name: {source.name}-{index}")
        yield from _place(here, source)
        if source.max_documents is not None and source.max_documents < 1:
            yield Problem(f"{here}.max_documents", show(source.max_documents), "must be at least 1", "leave it null")


def _place(here: str, source: SourceConfig) -> Iterator[Problem]:
    """Where one source comes from."""
    given = [key for key in _KINDS if getattr(source, key) is not None]
    if len(given) != 1:
        rule = f"a source has exactly one of {', '.join(_KINDS)}" + (f", not {' and '.join(given)}" if given else "")
        yield Problem(here, f"name: {source.name}", rule, "give one, such as prefix: PATH")
        return
    (kind,) = given
    if not getattr(source, kind).strip():
        yield Problem(f"{here}.{kind}", "''", "must not be empty", f"write {kind}: PATH")
    for key in ("prefix", "validation"):
        path = getattr(source, key)
        if path is not None and path.endswith((".bin", ".idx")):
            yield Problem(f"{here}.{key}", path, "is the path without .bin/.idx", f"write {key}: {path[:-4]}")
    if source.validation is not None and kind != "prefix":
        rule = "goes with prefix; of what is prepared here data.held_out of the documents are kept for validation"
        yield Problem(f"{here}.validation", source.validation, rule, "leave it out")
    for key in _OF_DATASETS:
        if getattr(source, key) is not None and kind != "dataset":
            yield Problem(f"{here}.{key}", show(getattr(source, key)), "goes with dataset", "leave it out")


def _weights(config: Config) -> Iterator[Problem]:
    data = config.data
    given = {source.name: source.weight for source in data.sources if source.weight is not None}
    if data.temperature is not None:
        if given:
            rule = "the sources have weights, but it gives them weights itself"
            yield Problem(
                "data.temperature", show(data.temperature), rule, "leave out one of the two", ("data.sources",)
            )
        return
    if given and len(given) < len(data.sources):
        without = next(source.name for source in data.sources if source.weight is None)
        rule = f"some sources have a weight, and {without} has none"
        yield Problem("data.sources", show(given), rule, "give all of them a weight, or none")
        return
    if (fault := _weight_fault(given)) is not None:
        yield Problem("data.sources", show(given), *fault)


def _weight_fault(weights: Mapping[str, float]) -> tuple[str, str] | None:
    """What is wrong with a mixture's weights, and what to do."""
    if not weights:
        return None
    if min(weights.values()) < 0 or max(weights.values()) == 0:
        return "weights must be at least 0, and one of them above", f"write weights such as {_WEIGHTS}"
    total, shares = sum(weights.values()), any(0 < weight < 1 for weight in weights.values())
    if shares and not isclose(total, 1.0, rel_tol=1e-6):
        right = ", ".join(f"{name}: {weight / total:.4g}" for name, weight in weights.items())
        rule = f"weights below 1 are shares, which must add up to 1, not to {total:.6g}"
        return rule, f"write {right}; or proportions in numbers from 1 on, such as 7 and 3"
    return None


def _phases(config: Config) -> Iterator[Problem]:
    phases, names = config.data.phases, [source.name for source in config.data.sources]
    for index, phase in enumerate(phases):
        here, last = f"data.phases[{index}]", index == len(phases) - 1
        if phase.tokens is None and not last:
            yield Problem(f"{here}.tokens", "null", "only the last phase may last to the end", "write tokens: N")
        if phase.tokens is not None and last:
            rule = "the last phase lasts to the end"
            fix = "leave its tokens out, or add a phase for what follows, {} for the sources' own weights"
            yield Problem(f"{here}.tokens", show(phase.tokens), rule, fix)
        if phase.tokens is not None and phase.tokens < config.train.seq_len:
            rule = f"must be at least one sample of train.seq_len={config.train.seq_len} tokens"
            yield Problem(f"{here}.tokens", show(phase.tokens), rule, f"write tokens: {config.train.seq_len}")
        for name in phase.weights or {}:
            if name not in names:
                rule = f"no source is called {name}; there are {', '.join(names)}"
                yield Problem(
                    f"{here}.weights",
                    show(phase.weights),
                    f"{rule}; {did_you_mean(name, names)}".rstrip("; "),
                    "name the sources",
                )
        if phase.weights is not None and not phase.weights:
            yield Problem(f"{here}.weights", "{}", "names no source", f"write weights: {_WEIGHTS}, or leave it null")
        if (fault := _weight_fault(phase.weights or {})) is not None:
            yield Problem(f"{here}.weights", show(phase.weights), *fault)
    if phases and config.data.temperature is not None and all(phase.weights for phase in phases):
        rule = "every phase has weights of its own"
        yield Problem("data.temperature", show(config.data.temperature), rule, "leave it out", ("data.phases",))


def _trained_vocabulary(config: Config) -> Iterator[Problem]:
    model, data = config.model.vocab_size, config.data
    trained = data.tokenizer is None and any(_kind(source) not in ("prefix", None) for source in data.sources)
    if trained and model is not None and model < data.vocab_size:
        rule = f"must hold the tokenizer's data.vocab_size={data.vocab_size} entries"
        fix = f"write model.vocab_size={data.vocab_size}, or leave it null"
        yield Problem("model.vocab_size", show(model), rule, fix, ("data.vocab_size", "data.sources"))


def _ramp(config: Config) -> Iterator[Problem]:
    for index, portion in enumerate(config.train.batch_ramp):
        for key in ("tokens", "global_batch"):
            if getattr(portion, key) < 1:
                here = f"train.batch_ramp[{index}].{key}"
                yield Problem(here, show(getattr(portion, key)), "must be at least 1", f"write {key}: 1")


def _skipped(config: Config) -> Iterator[Problem]:
    skips, total = config.train.skip_steps, total_steps(config)
    if 0 < total <= sum((each.first if each.last is None else each.last) - each.first + 1 for each in skips):
        rule = f"leaves none of the run's {total} steps to train"
        yield Problem("train.skip_steps", show(skips), rule, "pass over fewer, each once")
    for index, each in enumerate(config.train.skip_steps):
        here = f"train.skip_steps[{index}]"
        last = each.first if each.last is None else each.last
        if each.first < 1 or last < each.first or (total and last > total):
            rule = f"must be steps from 1 to the run's {total}, the first not behind the last"
            yield Problem(here, f"{each.first} to {last}", rule, f"write {{first: {max(1, each.first)}, last: N}}")


DATA_RULES: Sequence[Callable[[Config], Iterator[Problem]]] = (
    _any, _sources, _weights, _phases, _trained_vocabulary, _ramp, _skipped,
)  # fmt: skip
