"""Prove a layout before it is paid for: the same steps in one process and in the layout, number by number.

python -m launch.verify [key=value ...] --ranks N [--steps K] [--precision fp64|own] [--config-dir DIR]

Your configuration is made small (layers, width, vocabulary, sequence), its structure and its layout are kept,
and it trains on uneven random documents on this machine's CPU over gloo: no GPU is needed. In fp64, where
rounding cannot hide a fault, the loss, the norm and every parameter's gradient must be equal at every step.
Exit code 1 where they are not. A setting whose meaning depends on the layout is refused (2): nothing can be proven.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from conf.compose import compose
from conf.moe_rules import layout_dependent_settings
from conf.problem import refuse
from conf.schema import Config
from errors import ConfigRefused, exit_code_of
from launch.shrink import shrink
from launch.tolerance import TOLERANCES, Tolerance
from launch.trial import Tensors, Trial, run_trial, write_trial_corpus
from model.parts import layers_of_stages
from parallel.config import ParallelConfig
from parallel.layout import layout_of
from parallel.schedules import schedule_name


@dataclass(frozen=True)
class Worst:
    """The parameter that differs most."""

    error: float
    """||difference|| / ||value||; where the value is zero, the norm of the other's."""
    name: str
    """Which."""


@dataclass(frozen=True)
class StepComparison:
    """One step in both layouts."""

    loss: float
    """One process's."""
    other_loss: float
    """The layout's."""
    norm_error: float
    """Relative."""
    gradient: Worst | None
    """Where gradients are compared at this step."""

    @property
    def loss_error(self) -> float:
        """Relative."""
        return relative(self.loss, self.other_loss)


@dataclass(frozen=True)
class Comparison:
    """All steps."""

    steps: list[StepComparison]
    """In order."""
    parameter: Worst
    """After the last step."""
    val_loss_error: float
    """Of an evaluation after the last step."""
    tolerance: Tolerance
    """What is allowed."""

    @property
    def faults(self) -> list[str]:
        """What is beyond the tolerance, in words."""
        return list(self._faults())

    def _faults(self) -> Iterator[str]:
        allowed = self.tolerance
        for number, step in enumerate(self.steps, 1):
            if not step.loss_error <= allowed.loss:
                yield f"step {number}: loss {step.other_loss:.9f}, one process has {step.loss:.9f}"
            if not step.norm_error <= allowed.norm:
                yield f"step {number}: the gradient norm differs by {step.norm_error:.1e}"
            if step.gradient is not None and not step.gradient.error <= allowed.gradient:
                yield f"step {number}: the gradient of {step.gradient.name} differs by {step.gradient.error:.1e}"
        if not self.parameter.error <= allowed.parameter:
            yield f"after the last step {self.parameter.name} differs by {self.parameter.error:.1e}"
        if not self.val_loss_error <= allowed.loss:
            yield f"the validation loss differs by {self.val_loss_error:.1e}"


def relative(value: float, other: float) -> float:
    """|difference| / |value|."""
    return abs(other - value) / abs(value) if value else abs(other)


def worst(reference: Tensors, other: Tensors) -> Worst:
    """The parameter with the largest error; one that is missing is infinitely wrong."""
    found = Worst(0.0, "")
    for name in sorted(reference.keys() | other.keys()):
        if name not in reference or name not in other or reference[name].shape != other[name].shape:
            return Worst(math.inf, name)
        size = float(np.linalg.norm(reference[name]))
        error = float(np.linalg.norm(other[name] - reference[name])) / (size or 1.0)
        if math.isnan(error):
            return Worst(math.inf, name)
        found = max(found, Worst(error, name), key=lambda each: each.error)
    return found


def compare(one: Trial, other: Trial, tolerance: Tolerance) -> Comparison:
    """Both trials, number by number."""
    steps = []
    for number, (loss, norm) in enumerate(zip(one.losses, one.norms, strict=True)):
        kept = number < len(one.gradients)
        gradient = worst(one.gradients[number], other.gradients[number]) if kept else None
        steps.append(StepComparison(loss, other.losses[number], relative(norm, other.norms[number]), gradient))
    return Comparison(
        steps, worst(one.parameters, other.parameters), relative(one.val_loss, other.val_loss), tolerance
    )  # fmt: skip


def alone(config: Config) -> Config:
    """The same training by one process, which keeps its activations and compiles nothing."""
    return replace(config, parallel=ParallelConfig(), train=replace(config.train, recompute="none", compile=False))


def verify(config: Config, ranks: int, steps: int) -> Comparison:
    """Run a (small) configuration both ways."""
    tolerance = TOLERANCES[config.precision.name]
    samples = (steps + 1) * config.train.global_batch * config.train.seq_len
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = config.model.vocab_size or 0
        corpus = write_trial_corpus(Path(folder) / "trial", vocab_size, min(samples, 200_000) + 200)
        one = run_trial(alone(config), corpus, 1, steps, tolerance.steps)
        other = run_trial(config, corpus, ranks, steps, tolerance.steps)
    return compare(one, other, tolerance)


def table(comparison: Comparison) -> Iterator[str]:
    """A line a step."""
    yield f"{'step':>5}  {'loss, one process':>18}  {'in the layout':>18}  {'error':>8}  {'norm':>8}  worst gradient"
    for number, step in enumerate(comparison.steps, 1):
        gradient = f"{step.gradient.error:.1e} {step.gradient.name}" if step.gradient else "not compared"
        yield (
            f"{number:>5}  {step.loss:>18.12f}  {step.other_loss:>18.12f}  {step.loss_error:>8.1e}  "
            f"{step.norm_error:>8.1e}  {gradient}"
        )
    after, allowed = comparison.parameter, comparison.tolerance
    yield f"parameters after the last step: {after.error:.1e} {after.name}"
    yield f"validation loss: {comparison.val_loss_error:.1e}"
    yield (
        f"allowed: loss {allowed.loss:.0e}, norm {allowed.norm:.0e}, gradients {allowed.gradient:.0e}, "
        f"parameters {allowed.parameter:.0e}"
    )


def _covered(config: Config, ranks: int) -> Iterator[str]:
    """What of the configuration takes part in the proof, in words."""
    train, model, parallel = config.train, config.model, config.parallel
    dp = layout_of(parallel, ranks).dp
    yield f"{train.global_batch // (train.micro_batch * dp)} micro-batches of {train.micro_batch} sequences on a rank"
    if parallel.pp > 1:
        yield f"{schedule_name(parallel)} with layers {', '.join(map(str, layers_of_stages(model, parallel)))}"
    if parallel.cp > 1:
        yield f"sequences shared by {parallel.cp} ranks ({parallel.cp_exchange})"
    if model.moe is not None:
        shared = f" on {parallel.ep} ranks" if parallel.ep > 1 else ""
        yield f"{model.moe.experts} experts{shared}, {model.moe.top_k} for a token, balance {model.moe.balance}"
    yield f"recompute {train.recompute}"
    flags = {
        "tied embeddings": model.tied_embeddings, "biases": model.bias, "QK norms": model.qk_norm,
        "sliding window": model.window is not None, "document mask": config.data.document_mask,
        "z-loss": model.z_loss > 0, "compiled blocks": train.compile,
    }  # fmt: skip
    yield from (name for name, present in flags.items() if present)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration, as for train.py")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the layout")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (3)")
    parser.add_argument("--precision", choices=["fp64", "own"], default="fp64", help="fp64, or the configuration's")
    parser.add_argument("--config-dir", help="folder of your own YAML files")
    options = parser.parse_intermixed_args(argv)
    for name in ("ranks", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Print both trials; 0 where they agree, 1 where not, 2 for a configuration that cannot be."""
    options = _options(argv)
    return exit_code_of(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    whole = compose(options.overrides, options.config_dir, world=options.ranks, here=False)
    if options.ranks == 1:
        raise ConfigRefused("--ranks 1: one process is what a layout is compared with; give the ranks of the layout")
    refuse(layout_dependent_settings(whole.model))
    small = shrink(whole, options.ranks, options.steps, whole.precision.name if options.precision == "own" else "fp64")
    print(
        f"{layout_of(small.parallel, options.ranks).words}, zero {small.parallel.zero}, {small.precision.name}: "
        f"{small.model.layers} layers of hidden {small.model.hidden}, sequences of {small.train.seq_len} tokens, "
        f"{small.train.global_batch} a step"
    )
    print(f"covered: {', '.join(_covered(small, options.ranks))}")
    if whole.precision.in_fp8 and not small.precision.in_fp8:
        print(f"not covered: {whole.precision.name} (FP8 magnifies rounding; --precision own compares it, roughly)")
    comparison = verify(small, options.ranks, options.steps)
    for line in table(comparison):
        print(line)
    for fault in comparison.faults:
        print(f"FAULT: {fault}")
    print("the layout does NOT compute the same training" if comparison.faults else "the same training")
    return 1 if comparison.faults else 0


if __name__ == "__main__":
    sys.exit(main())
