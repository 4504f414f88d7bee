"""A few steps of a configuration on some ranks, with everything kept that two layouts must agree in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from checkpoint.pieces import Piece
from conf.resolve import ramp_of
from conf.schema import Config
from data.batch import MicroBatch, StepBatch
from data.corpus.indexed import IndexedCorpus
from data.corpus.writer import CorpusWriter
from data.loader import TrainLoader, validation_batches
from data.samples import Source, samples_of
from engine import Engine
from errors import Refused
from launch.spawn import run_ranks
from metrics.clock import StepClock
from optim.schedule import lr_share, peak_lr
from parallel.device import set_up_machine
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.process import joined
from parallel.ranks import Ranks
from parallel.shards import Shard

Array = npt.NDArray[np.float64]
_TIMEOUT = 600  # seconds a trial may take
Tensors = dict[str, Array]
"""Whole tensors by global name."""


class RanksDiffer(Refused):
    """The ranks of one layout do not agree among themselves."""


@dataclass
class Rectangles:
    """What one rank keeps of some tensors: (name, whole shape, start, elements)."""

    held: list[tuple[str, tuple[int, ...], tuple[int, ...], Array]] = field(default_factory=list)
    """A copy that another rank keeps is left out."""

    @staticmethod
    def of_gradients(shards: Sequence[Shard]) -> Rectangles:
        """The shards' gradients."""
        held = [(each, each.gradient) for each in shards if each.writes]
        return Rectangles([(s.name, s.shape, s.start, _array(g)) for s, g in held if g is not None])

    @staticmethod
    def of_model(pieces: Mapping[str, Piece]) -> Rectangles:
        """What a checkpoint keeps of the model itself: weights, and the biases of routers."""
        own = {n.removeprefix("model."): p for n, p in pieces.items() if n.startswith("model.") and p.writes}
        return Rectangles([(name, p.shape, p.start, _array(p.local)) for name, p in own.items()])


def _array(tensor: Tensor) -> Array:
    return tensor.detach().double().cpu().numpy().copy()


@dataclass
class RankTrial:
    """One rank's record."""

    losses: list[float] = field(default_factory=list)
    """Of each step, of all ranks."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step."""
    gradients: list[Rectangles] = field(default_factory=list)
    """Of each step that is compared."""
    parameters: Rectangles = field(default_factory=Rectangles)
    """After the last step."""
    val_loss: float = 0.0
    """Sum over held-out samples after the last step."""


@dataclass(frozen=True)
class Trial:
    """The record of all ranks."""

    losses: list[float]
    """Of each step."""
    norms: list[float]
    """Of each step."""
    gradients: list[Tensors]
    """Of each step that is compared."""
    parameters: Tensors
    """After the last step."""
    val_loss: float
    """Sum over held-out samples after the last step."""


def write_trial_corpus(prefix: Path, vocab_size: int, tokens: int, seed: int = 0) -> Path:
    """Documents of uneven lengths, each token near the one before it, at least `tokens` in all."""
    rng = np.random.default_rng(seed)
    written = 0
    with CorpusWriter(prefix, "int32") as writer:
        while written < tokens:
            steps = rng.integers(0, 3, int(rng.integers(5, 120)))
            writer.add_document((rng.integers(vocab_size) + steps.cumsum()) % vocab_size)
            written += len(steps)
        writer.finish(tokenizer="0" * 64, vocab_size=vocab_size, bytes_of_text=4 * written)
    return prefix


def run_trial(config: Config, corpus: Path, world: int, steps: int, compared: int | None) -> Trial:
    """`steps` steps of a configuration on `world` ranks of this machine.

    Args:
        config: with vocab_size filled in.
        corpus: prefix of `write_trial_corpus`.
        compared: steps whose gradients are kept; None: all.
    """
    return assemble(run_ranks(rank_trial, world, config, corpus, steps, compared, timeout=_TIMEOUT))


def rank_trial(ranks: Ranks, config: Config, corpus: Path, steps: int, compared: int | None) -> RankTrial:
    """One rank's part of `run_trial`."""
    config, device = replace(config, train=replace(config.train, threads=1)), torch.device("cpu")
    with joined(ranks, device, config.parallel.timeout) as everyone:
        machine = set_up_machine("cpu", 0, 1, 1, config.precision, 1.0, "highest", lambda _: None)
        mesh = make_mesh(
            layout_of(config.parallel, ranks.world), ranks.rank, device, config.parallel.timeout,
            experts=config.model.moe is not None, maxima=config.precision.name == "fp8_delayed",
        )  # fmt: skip
        engine = Engine(config, config.model, mesh, machine, StepClock(device))
        trial, peak = RankTrial(), peak_lr(config.optim, config.model.hidden)
        for number, batch in enumerate(trial_steps(config, corpus, steps, mesh.dp_rank, mesh.layout.dp)):
            agreed = engine.agree(everyone, batch, stops=False)
            keep = compared is None or number < compared
            lr = peak * lr_share(config.lr_schedule, number, steps)
            sums, outcome = engine.step(
                batch.micro_batches, agreed.valid_tokens, lr,
                lambda shards: trial.gradients.append(Rectangles.of_gradients(shards)) if keep else None,  # noqa: B023
            )  # fmt: skip
            trial.losses.append(engine.everywhere(sums)[0] / agreed.valid_tokens)
            trial.norms.append(outcome.grad_norm.item())
        trial.parameters = Rectangles.of_model(engine.pieces())
        trial.val_loss = engine.evaluate(_held_out(config, corpus, mesh.dp_rank, mesh.layout.dp, engine.micro_batches))
        return trial


def trial_steps(config: Config, corpus: Path, steps: int, rank: int = 0, ranks: int = 1) -> Iterator[StepBatch]:
    """The first steps by a run's own loader over the trial's corpus."""
    train = config.train
    samples = samples_of(Source("trial", IndexedCorpus(corpus), config.run.seed), train.seq_len)
    loader = TrainLoader(
        samples, sizes=ramp_of(config).sizes, micro_batch=train.micro_batch,
        document_mask=config.data.document_mask, vocab_size=config.model.vocab_size or 0, prefetch=0,
        rank=rank, ranks=ranks,
    )  # fmt: skip
    return loader.steps(ramp_of(config).plan(0, 0, steps))


def _held_out(config: Config, corpus: Path, rank: int, ranks: int, group: int) -> Iterator[tuple[MicroBatch, ...]]:
    """A few samples for an evaluation; an odd number, so that some rows are filled up."""
    return validation_batches(
        IndexedCorpus(corpus), seq_len=config.train.seq_len, micro_batch=config.train.micro_batch, samples=7,
        document_mask=config.data.document_mask, vocab_size=config.model.vocab_size or 0,
        rank=rank, ranks=ranks, group=group if config.parallel.pp > 1 else 1,
    )  # fmt: skip


def assemble(records: Sequence[RankTrial]) -> Trial:
    """Put the ranks' rectangles together.

    Raises:
        RanksDiffer: a rank saw another loss or norm.
    """
    first = records[0]
    for rank, other in enumerate(records):
        same = np.array_equal(other.losses + other.norms, first.losses + first.norms, equal_nan=True)
        if not same:
            raise RanksDiffer(f"rank {rank} saw other losses or norms than rank 0: {other.norms} and {first.norms}")
    gradients = [_whole([r.gradients[step] for r in records]) for step in range(len(first.gradients))]
    parameters = _whole([r.parameters for r in records])
    return Trial(first.losses, first.norms, gradients, parameters, first.val_loss)


def _whole(parts: Sequence[Rectangles]) -> Tensors:
    """Whole tensors; an element that no rank holds stays NaN, so that it is found."""
    tensors: Tensors = {}
    for part in parts:
        for name, shape, start, elements in part.held:
            out = tensors.setdefault(name, np.full(shape, np.nan))
            out[tuple(slice(s, s + n) for s, n in zip(start, elements.shape, strict=True))] = elements
    return tensors
