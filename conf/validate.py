"""Every rule a configuration keeps: ranges of single keys, then rules of several, of the cut and of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from conf.convert import read
from conf.layers import find
from conf.layout_rules import layout_problems
from conf.machine import machine_problems
from conf.problem import Problem, assign, show
from conf.resolve import to_dict
from conf.rules import rule_problems
from conf.safety_rules import injection_problems
from conf.schema import Config
from conf.tree import leaves

_SEEDS = 2**63


@dataclass(frozen=True)
class Range:
    """The numbers that a key, or each item of a list, may take; null, where the type allows it, is always in."""

    key: str
    """Dotted key."""
    low: float | None = None
    """Smallest, itself included unless `above`."""
    high: float | None = None
    """Largest, itself included unless `below`."""
    above: bool = False
    """Whether low itself is out."""
    below: bool = False
    """Whether high itself is out."""

    def holds(self, value: float) -> bool:
        """Whether a value is inside."""
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return not (self.high is not None and (value > self.high or (self.below and value == self.high)))

    def words(self) -> str:
        """The rule, to be read after `must be`."""
        low = f"{'above' if self.above else 'at least'} {show(self.low)}" if self.low is not None else ""
        high = f"{'below' if self.below else 'at most'} {show(self.high)}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)

    def nearest(self, value: float) -> float | None:
        """The bound that a value outside missed, if that bound is itself inside."""
        bound = self.low if self.low is not None and value <= self.low else self.high
        return bound if bound is not None and self.holds(bound) else None


RANGES = (
    Range("run.seed", 0, _SEEDS, below=True),
    Range("train.steps", 1),
    Range("train.tokens", 1),
    Range("train.stop_at", 1),
    Range("train.global_batch", 1),
    Range("train.micro_batch", 0),
    Range("train.seq_len", 1),
    Range("train.eval_every", 0),
    Range("train.eval_samples", 1),
    Range("train.max_skips", 1),
    Range("train.max_hours", 0, above=True),
    Range("train.gc_every", 0),
    Range("train.recompute_n", 1),
    Range("train.threads", 1),
    Range("model.hidden", 1),
    Range("model.layers", 1),
    Range("model.heads", 1),
    Range("model.kv_heads", 1),
    Range("model.head_dim", 2),
    Range("model.ffn", 1),
    Range("model.moe.experts", 1),
    Range("model.moe.top_k", 1),
    Range("model.moe.ffn", 1),
    Range("model.moe.shared_ffn", 0),
    Range("model.moe.first_dense", 0),
    Range("model.moe.every", 1),
    Range("model.moe.scale", 0, above=True),
    Range("model.moe.groups", 1),
    Range("model.moe.groups_chosen", 1),
    Range("model.moe.bias_rate", 0),
    Range("model.moe.aux_coefficient", 0),
    Range("model.moe.z_loss", 0),
    Range("model.moe.capacity_factor", 0, above=True),
    Range("model.norm_eps", 0, above=True),
    Range("model.rope_theta", 1, above=True),
    Range("model.rope_scaling.factor", 1),
    Range("model.rope_scaling.low_freq_factor", 0, above=True),
    Range("model.rope_scaling.high_freq_factor", 0, above=True),
    Range("model.rope_scaling.original_seq_len", 1),
    Range("model.window", 1),
    Range("model.vocab_size", 2, 10_000_000),
    Range("model.vocab_multiple", 1, 65_536),
    Range("model.init_std", 0, above=True),
    Range("model.z_loss", 0),
    Range("model.loss_chunk", 1),
    Range("data.vocab_size", 512, 1_000_000),
    Range("data.held_out", 0, 0.5),
    Range("data.shuffle_seed", 0, _SEEDS, below=True),
    Range("data.temperature", 0, above=True),
    Range("data.max_epochs", 0, above=True),
    Range("data.workers", 0),
    Range("data.prefetch", 0),
    Range("parallel.tp", 1),
    Range("parallel.cp", 1),
    Range("parallel.ep", 1),
    Range("parallel.pp", 1),
    Range("parallel.vpp", 1),
    Range("parallel.layers_per_stage", 1),
    Range("parallel.zero", 0, 3),
    Range("parallel.replicate", 1),
    Range("parallel.timeout", 1),
    Range("precision.fp16.initial", 2.0**-14, 2.0**40),
    Range("precision.fp16.growth_interval", 1, 10_000_000),
    Range("precision.fp16.least", 2.0**-14, 2.0**24),
    Range("precision.fp8.margin", -64, 64),
    Range("precision.fp8.history", 1, 65_536),
    Range("precision.fp8.first_bf16", 0),
    Range("precision.fp8.last_bf16", 0),
    Range("precision.fp8.health_every", 0),
    Range("optim.lr", 0, above=True),
    Range("optim.beta1", 0, 1, below=True),
    Range("optim.beta2", 0, 1, below=True),
    Range("optim.eps", 0, above=True),
    Range("optim.weight_decay", 0),
    Range("optim.clip", 0),
    Range("lr_schedule.warmup", 0),
    Range("lr_schedule.min_ratio", 0, 1),
    Range("lr_schedule.decay_share", 0, 1, above=True),
    Range("checkpoint.every", 0),
    Range("checkpoint.keep", 0),
    Range("checkpoint.keep_every", 0),
    Range("metrics.every", 1),
    Range("metrics.peak_tflops", 0, above=True),
    Range("metrics.replica_check", 0),
    Range("health.window", 8, 100_000),
    Range("health.sigma", 0, above=True),
    Range("health.pass_over", 1),
    Range("health.max_rollbacks", 1),
    Range("health.locate", 0),
    Range("health.straggler", 0),
    Range("health.limits.start", 0),
    Range("health.limits.data", 0),
    Range("health.limits.compute", 0),
    Range("health.limits.evaluation", 0),
    Range("health.limits.checkpoint", 0),
)


def problems(config: Config, *, world: int = 1, here: bool = True) -> list[Problem]:
    """Everything in a configuration that cannot work, on this machine and with `world` processes too."""
    out_of_range = list(_range_problems(config))
    bad = {problem.key for problem in out_of_range}
    sound = _with_defaults(config, bad) if bad else config
    laid_out = [*layout_problems(sound, world), *_ramp_problems(sound, world), *injection_problems(sound, world)]
    crossed = [*rule_problems(sound), *laid_out, *(machine_problems(sound) if here else [])]
    return [*out_of_range, *(each for each in crossed if not bad & {each.key, *each.also})]


def _with_defaults(config: Config, keys: Iterable[str]) -> Config:
    """The configuration with the defaults of some keys, so that the rules need not fear a 0 or a -1."""
    values, known = to_dict(config), leaves()
    for key in keys:
        *above, name = key.split(".")
        section = values
        for part in above:
            section = section[part]
        section[name] = known[key].default
    return read(values)[0]


def _ramp_problems(config: Config, world: int) -> Iterator[Problem]:
    """What the layout misses in the sizes of train.batch_ramp, and has in the whole batch."""
    known = {problem.key for problem in layout_problems(config, world)}
    for index, portion in enumerate(config.train.batch_ramp):
        size = max(1, portion.global_batch)
        ramped = replace(config, train=replace(config.train, global_batch=size, batch_ramp=()))
        for problem in layout_problems(ramped, world):
            if problem.key not in known and "train.global_batch" in (problem.key, *problem.also):
                rule = f"with train.global_batch={size}, train.micro_batch={config.train.micro_batch}: {problem.rule}"
                fix = "give the portion a batch that suits the layout as train.global_batch does"
                yield Problem(f"train.batch_ramp[{index}].global_batch", show(size), rule, fix, problem.also)


def _range_problems(config: Config) -> Iterator[Problem]:
    values, known = to_dict(config), leaves()
    for rule in RANGES:
        value, default = find(values, rule.key)[1], known[rule.key].default
        items = value if isinstance(value, list) else [value]
        if all(item is None or rule.holds(item) for item in items):
            continue
        usable = isinstance(value, list) or (isinstance(default, (int, float)) and rule.holds(default))
        better = default if usable else rule.nearest(value)
        fix = f"write {assign(rule.key, better)}"
        if better == default:
            fix += " (the default)"
        each = "each item " if isinstance(value, list) else ""
        yield Problem(rule.key, show(value), f"{each}must be {rule.words()}", fix)
