"""What a run reads: the samples of its sources from where it stands, and their held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.run_state import RunState
from conf.resolve import ramp_of
from conf.schema import Config
from data.batch import MicroBatch
from data.corpus.joined import Corpus, open_corpus
from data.loader import TrainLoader, validation_batches
from data.phases import planned_phases
from data.ready import ReadyData, ReadySource
from data.samples import Phase, Samples, Source, going_on
from errors import DataRefused
from start import last_step

Say = Callable[[str], None]


@dataclass(frozen=True)
class Share:
    """Which part of the samples a process reads, and how."""

    vocab_size: int
    """Ids must be below it."""
    rank: int = 0
    """Among those that read different samples."""
    ranks: int = 1
    """How many read different samples."""
    group: int = 1
    """Held-out micro-batches that are worked on at a time."""
    pin: bool = False
    """Whether batches lie in memory that a GPU reads by itself."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out sequences of one source."""

    source: ReadySource
    """Where they come from."""
    batches: Sequence[tuple[MicroBatch, ...]]
    """This process's."""

    @property
    def valid_tokens(self) -> int:
        """Positions with a target in this process's."""
        return sum(batch.valid_tokens for group in self.batches for batch in group)


def open_samples(config: Config, data: ReadyData, saved: RunState | None, say: Say) -> Samples:
    """The samples of the run from its beginning on, and what there is to say of them.

    Raises:
        DataRefused: a source is too short, has nothing to learn, or is another one than when the run was saved.
    """
    sources = [Source(each.name, _opened(each.train, config), config.run.seed) for each in data.sources]
    sizes = {each.name: each.corpus.tokens for each in sources}
    stands = (saved.samples, saved.tokens) if saved else (0, 0)
    phases = planned_phases(config.data, sizes, config.train.seq_len, *stands)
    if saved:
        _check_same(data, saved)
        phases = going_on([Phase.of(record) for record in saved.phases], phases, saved.samples)
    samples = Samples(sources, phases)
    for source in sources:
        corpus, order = source.corpus, source.order(config.train.seq_len)
        say(f"data: {source.name}, {corpus.tokens:,} tokens, {corpus.documents:,} documents; {order.report}")
    _announce_phases(samples, stands[0], say)
    _warn_of_epochs(config, samples, saved, say)
    return samples


def open_loader(config: Config, samples: Samples, share: Share) -> TrainLoader:
    """This process's part of every step."""
    return TrainLoader(
        samples, sizes=ramp_of(config).sizes, micro_batch=config.train.micro_batch,
        document_mask=config.data.document_mask, vocab_size=share.vocab_size, prefetch=config.data.prefetch,
        rank=share.rank, ranks=share.ranks, pin=share.pin,
    )  # fmt: skip


def open_held_out(config: Config, data: ReadyData, share: Share, say: Say) -> list[HeldOut]:
    """The held-out sequences of each source that has some; none where nothing is ever validated."""
    without = [each.name for each in data.sources if each.validation is None]
    if len(without) == len(data.sources) or not config.train.eval_every:
        say("validation: none" + (" (no source has a held-out corpus)" if without else ""))
        return []
    if without:
        say(f"validation: none of {', '.join(without)}, which have no held-out corpus")
    return [_held_out(config, each, each.validation, share) for each in data.sources if each.validation is not None]


def _held_out(config: Config, source: ReadySource, prefix: str, share: Share) -> HeldOut:
    batches = validation_batches(
        _opened(prefix, config), samples=config.train.eval_samples, micro_batch=config.train.micro_batch,
        seq_len=config.train.seq_len, document_mask=config.data.document_mask, vocab_size=share.vocab_size,
        rank=share.rank, ranks=share.ranks, group=share.group,
    )  # fmt: skip
    return HeldOut(source, list(batches))


def _opened(prefix: str, config: Config) -> Corpus:
    corpus = open_corpus(prefix)
    require_targets(corpus, prefix, config.data.document_mask)
    return corpus


def require_targets(corpus: Corpus, prefix: str | Path, document_mask: bool) -> None:
    """Refuse a corpus of which no token can be predicted from another.

    Raises:
        DataRefused: documents are masked from each other, and each is a single token.
    """
    if document_mask and corpus.tokens <= corpus.documents:
        raise DataRefused(
            f"{prefix} has nothing to learn: its {corpus.documents:,} documents hold {corpus.tokens:,} tokens, and "
            "under data.document_mask=true a document's first token has no context; prepare longer documents, or "
            "write data.document_mask=false"
        )


def _check_same(data: ReadyData, saved: RunState) -> None:
    """Refuse sources that hold other text than when the run was saved; one that is new, or gone, may be so."""
    if data.tokenizer_fingerprint and saved.tokenizer_fingerprint not in (None, data.tokenizer_fingerprint):
        raise DataRefused(
            f"the run began with a tokenizer of SHA-256 {saved.tokenizer_fingerprint[:16]}..., but the data is made "
            f"with {data.tokenizer_fingerprint[:16]}... now: the model would read other words; give data.tokenizer the "
            "one that it began with (it lies in the checkpoint), or start another run"
        )
    for source in data.sources:
        was = saved.data.get(source.name, source.fingerprint)
        if was != source.fingerprint:
            raise DataRefused(
                f"source {source.name} was trained on other data than {source.train} holds now: fingerprint {was} "
                f"then, {source.fingerprint} now; give the run its corpus back, give the new one another name, or "
                "start another run"
            )


def _announce_phases(samples: Samples, stands: int, say: Say) -> None:
    """The mixture in force and those to come, where there is anything to tell."""
    coming = [each for each in samples.phases if each.first > stands]
    now = next(each for each in reversed(samples.phases) if each.first <= stands)
    if len(samples.sources) == 1 and not coming and not samples.past(stands)[1:]:
        return
    for phase in (now, *coming):
        begins = f"from sample {phase.first:,} on" if phase.first else "from the beginning"
        say(f"mixture {begins}: {', '.join(f'{name} {share:.4g}' for name, share in phase.shares.items())}")


def _warn_of_epochs(config: Config, samples: Samples, saved: RunState | None, say: Say) -> None:
    """Say which sources this start will have read too often by its end."""
    stands, done = (saved.samples, saved.step) if saved else (0, 0)
    end = ramp_of(config).after(stands, max(0, last_step(config) - done))
    for name, epochs in samples.epochs(end).items():
        if epochs > config.data.max_epochs:
            say(
                f"warning: source {name} will have been read {epochs:.2f} times by step {last_step(config)} "
                f"(data.max_epochs={config.data.max_epochs:g}): repeats teach less and less; give it more data, or a "
                "smaller weight"
            )


@dataclass(frozen=True)
class Validation:
    """The losses of one validation, in nats a token."""

    held_out: Sequence[HeldOut]
    """What was read."""
    sums: Sequence[float]
    """Cross-entropy of each, summed over all processes."""
    counts: Sequence[int]
    """Positions with a target of each, on all processes."""

    @property
    def losses(self) -> dict[str, float]:
        """By source."""
        three = zip(self.held_out, self.sums, self.counts, strict=True)
        return {each.source.name: total / max(1, count) for each, total, count in three}

    @property
    def whole(self) -> float:
        """Over all tokens of all sources."""
        return sum(self.sums) / max(1, sum(self.counts))

    def by_source(self) -> dict[str, dict[str, float]]:
        """What a record holds of each source; bits per byte do not depend on the tokenizer, where known."""
        found = {}
        for each in self.held_out:
            loss, length = self.losses[each.source.name], each.source.held_out_bytes_per_token
            bits = {} if length is None else {"bits_per_byte": loss / math.log(2) / length}
            found[each.source.name] = {"loss": loss, **bits}
        return found

    def words(self) -> str:
        """The whole, then each source where there are several."""
        parts = []
        for name, told in self.by_source().items():
            bits = f"{told['bits_per_byte']:.4f} bits/byte" if "bits_per_byte" in told else ""
            if len(self.held_out) > 1:
                parts.append(f"{name} {told['loss']:.4f}" + (f" ({bits})" if bits else ""))
            elif bits:
                parts.append(bits)
        return ", ".join([f"loss {self.whole:.4f} nats/token", *parts])

    def verdict(self) -> list[str]:
        """How far each source is from guessing."""
        return [
            f"validation loss{f' of {each.source.name}' if len(self.held_out) > 1 else ''} "
            f"{self.losses[each.source.name]:.3f} nats/token; guessing by frequency alone (unigram entropy) gives "
            f"{each.source.unigram_entropy:.3f}"
            for each in self.held_out
        ]
