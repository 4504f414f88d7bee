"""The mixture of each stretch of a run, from its configuration and the sizes of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from data.config import DataConfig
from data.mixture import period_counts, temperature_weights
from data.samples import Phase


def planned_phases(
    config: DataConfig, sizes: Mapping[str, int], seq_len: int, sample: int = 0, tokens: int = 0
) -> list[Phase]:  # fmt: skip
    """The phases as the configuration has them, for a run that stands at `sample` after `tokens` tokens.

    Args:
        sizes: tokens of each source.
        seq_len: tokens of each coming sample.
    """
    usual = source_weights(config, sizes)
    found, begin = {0: _phase(0, usual, seq_len)}, 0  # begin: in tokens of the run
    for phase in config.phases:
        first = max(0, sample + (begin - tokens) // seq_len) if begin else 0
        named = {name: exact(weight) for name, weight in (phase.weights or {}).items() if weight}
        found[first] = _phase(first, named or usual, seq_len)  # in place of one shorter than a sample
        begin += phase.tokens or 0
    return list(found.values())


def source_weights(config: DataConfig, sizes: Mapping[str, int]) -> dict[str, Fraction]:
    """Weight of each source outside phases, those of weight 0 left out."""
    if config.temperature is not None:
        names = [source.name for source in config.sources]
        return dict(zip(names, temperature_weights([sizes[name] for name in names], config.temperature), strict=True))
    weights = {source.name: exact(1.0 if source.weight is None else source.weight) for source in config.sources}
    return {name: weight for name, weight in weights.items() if weight}


def exact(weight: float) -> Fraction:
    """A weight as it was written: 0.1 is a tenth."""
    return Fraction(repr(weight))


def _phase(first: int, weights: Mapping[str, Fraction], seq_len: int) -> Phase:
    return Phase(first, dict(zip(weights, period_counts(list(weights.values())), strict=True)), seq_len)
