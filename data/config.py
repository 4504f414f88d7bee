"""What a run reads: the settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceConfig:
    """One corpus on disk, in Megatron's .bin/.idx format."""

    name: str
    """Name of the source in metrics and in the data order's key."""
    prefix: str
    """Path of the corpus without .bin/.idx."""
    validation: str | None = None
    """Prefix of a held-out corpus; none: no validation for this source."""


@dataclass(frozen=True)
class DataConfig:
    """The data of a run: either a self-preparing corpus or sources on disk."""

    name: str = "stdlib"
    """Short name of the data; goes into run.name."""
    corpus: str | None = None
    """A corpus that prepares itself on first use ("stdlib"); none when `sources` is given."""
    sources: tuple[SourceConfig, ...] = ()
    """Corpora on disk; exactly one is supported in this version."""
    tokenizer: str | None = None
    """Path of the sentencepiece model that made the sources; none with a self-preparing corpus."""
    document_mask: bool = True
    """Whether attention and loss stop at document borders inside a sequence."""
    cache: str = "~/.cache/tatara"
    """Folder where self-preparing corpora are kept; every process of a run must see the same one."""
    vocab_size: int = 8192
    """Entries of the tokenizer that a self-preparing corpus trains."""
    held_out: float = 0.02
    """Share of a self-preparing corpus's documents held out for validation, from 0 to 0.5."""
    shuffle_seed: int = 0
    """Seed of the one document shuffle at preparation (run.seed shuffles the samples)."""
    prefetch: int = 2
    """Steps prepared ahead by the loader's thread, in steps; 0: no thread, each step is made when asked
    for."""
