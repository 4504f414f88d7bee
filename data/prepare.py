"""Makes a run's data ready: opens corpora on disk, or prepares the standard library on first use.

    cache/stdlib-<16 hex>/train.bin train.idx train.json   validation.bin ...   tokenizer.model

The folder's name is a fingerprint of everything that its content depends on. It is built beside and renamed,
so a folder of that name is whole.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from data import stdlib
from data.config import DataConfig, SourceConfig
from data.indexed import IndexedCorpus
from data.lock import exclusive
from data.metadata import CorpusMetadata, read_metadata
from data.progress import Say, tracked
from data.stdlib import Document
from data.tokenizer import Tokenizer, read_model, train_sentencepiece
from data.writer import CorpusWriter, entropy, token_dtype
from errors import DataRefused
from files import sync

_PREPARATION = 1
"""Raised whenever the same documents and settings would give other tokens."""
_ENTROPY_SAMPLE = 4_000_000

_SELF_PREPARING: Mapping[str, Callable[[Path | None], list[Document]]] = {"stdlib": stdlib.collect}


@dataclass(frozen=True)
class ReadySource:
    """A source that can be opened."""

    name: str
    """Name of the source in metrics and in the data order's key."""
    train: Path
    """Prefix of the training corpus."""
    validation: Path | None
    """Prefix of the held-out corpus, if there is one."""


@dataclass(frozen=True)
class ReadyData:
    """Data that was found, opened and checked."""

    source: ReadySource
    """Where the tokens are."""
    tokenizer: Path | None
    """The sentencepiece model, if one is known."""
    vocab_size: int
    """Entries of the vocabulary; every id is below it."""
    unigram_entropy: float
    """Entropy of the training corpus's token frequencies, in nats a token.

    Exact where this repository prepared the corpus, else of some 4 million of its tokens.
    """
    bytes_per_token: float | None
    """UTF-8 bytes of text a token; None where no .json tells."""
    fingerprint: str
    """Identifies the training corpus's content, in hex; another one under the same name has another."""


def ready(config: DataConfig, say: Say, model_vocab: int | None = None, root: Path | None = None) -> ReadyData:
    """Finds, opens and checks the data of `config`, and prepares a self-preparing corpus on first use.

    Any number of processes may call it at once: one a file system prepares, the others wait. `say` prints a
    line. `model_vocab`: entries that the model is set to have, for corpora that do not tell theirs. `root`:
    folder that a self-preparing corpus reads; None: its usual one. Raises DataRefused.
    """
    if config.corpus is not None and config.sources:
        raise DataRefused(
            f"data.corpus={config.corpus} and data.sources are both set, but a run reads one or the other: remove one"
        )
    if config.corpus is not None:
        data = _self_prepared(config, config.corpus, say, root)
    else:
        data = _from_source(config, _only(config.sources), model_vocab)
    if model_vocab is not None and data.vocab_size > model_vocab:
        raise DataRefused(
            f"the data's vocabulary has {data.vocab_size} entries, but the model only "
            f"{model_vocab}: raise the model's vocabulary, or leave it to be taken from the "
            "data"
        )
    return data


def _only(sources: Sequence[SourceConfig]) -> SourceConfig:
    if not sources:
        raise DataRefused("there is no data: set data.corpus=stdlib, or data.sources=[{name: NAME, prefix: PATH}]")
    if len(sources) > 1:
        names = ", ".join(source.name for source in sources)
        raise DataRefused(
            f"data.sources has {len(sources)} sources ({names}), but mixtures of several "
            "sources are not available in this version: give one"
        )
    return sources[0]


def _from_source(config: DataConfig, source: SourceConfig, model_vocab: int | None) -> ReadyData:
    corpus = IndexedCorpus(source.prefix)
    metadata = _metadata(corpus)
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer else None
    if tokenizer and metadata and tokenizer.fingerprint != metadata.tokenizer:
        raise DataRefused(
            f"data.tokenizer={config.tokenizer} has SHA-256 {tokenizer.fingerprint[:16]}..., "
            f"but {corpus.prefix} was made with {metadata.tokenizer[:16]}...: its ids would "
            "mean other text; give the tokenizer that made it"
        )
    known = tokenizer or metadata
    vocab_size = known.vocab_size if known else model_vocab
    if vocab_size is None:
        raise DataRefused(
            f"the vocabulary of {corpus.prefix} is unknown (no .json beside it): set "
            "data.tokenizer, or the model's vocabulary size"
        )
    validation = _open_validation(source.validation, metadata)
    for opened in filter(None, (corpus, validation)):
        opened.check_ids(vocab_size)
    return ReadyData(
        source=ReadySource(source.name, corpus.prefix, validation.prefix if validation else None),
        tokenizer=tokenizer.path if tokenizer else None,
        vocab_size=vocab_size,
        unigram_entropy=metadata.unigram_entropy if metadata else _sampled_entropy(corpus),
        bytes_per_token=metadata.bytes_per_token if metadata else None,
        fingerprint=corpus.fingerprint(),
    )


def _open_validation(prefix: str | None, train: CorpusMetadata | None) -> IndexedCorpus | None:
    if prefix is None:
        return None
    corpus = IndexedCorpus(prefix)
    metadata = _metadata(corpus)
    if train and metadata and train.tokenizer != metadata.tokenizer:
        raise DataRefused(
            f"the validation corpus {prefix} was made with another tokenizer than the training "
            "corpus: prepare both with one"
        )
    return corpus


def _metadata(corpus: IndexedCorpus) -> CorpusMetadata | None:
    """The .json of `corpus`, which must describe these files and no others."""
    metadata = read_metadata(corpus.prefix)
    if metadata is None:
        return None
    told = (metadata.tokens, metadata.documents, metadata.dtype)
    found = (corpus.tokens, corpus.documents, corpus.dtype.name)
    if told != found:
        raise DataRefused(
            f"{corpus.prefix}.json tells of (tokens, documents, dtype) {told}, but the corpus "
            f"has {found}: the .json belongs to other files; copy or prepare the corpus again"
        )
    return metadata


def _sampled_entropy(corpus: IndexedCorpus) -> float:
    _, counts = np.unique(corpus.sample(_ENTROPY_SAMPLE), return_counts=True)
    return entropy(counts)


def _self_prepared(config: DataConfig, name: str, say: Say, root: Path | None) -> ReadyData:
    collect = _SELF_PREPARING.get(name)
    if collect is None:
        raise DataRefused(
            f"data.corpus={name} is unknown: it must be one of {', '.join(_SELF_PREPARING)}, or none with data.sources"
        )
    if config.tokenizer is not None:
        raise DataRefused(
            f"data.tokenizer={config.tokenizer} is set, but the corpus {name} trains its own: "
            "remove it, or set data.sources"
        )
    documents = collect(root)
    fingerprint = _fingerprint(name, documents, config)
    folder = Path(config.cache).expanduser() / f"{name}-{fingerprint[:16]}"
    _prepare_once(folder, lambda target, note: _build(target, documents, config, say, note), say)
    try:
        return _opened(folder, name, has_validation=config.held_out > 0)
    except DataRefused as error:
        raise DataRefused(f"{error} (it was prepared here: delete {folder} and start again)") from error


def _opened(folder: Path, name: str, has_validation: bool) -> ReadyData:
    tokenizer = folder / "tokenizer.model"
    prefixes = [folder / part for part in ("train", "validation")[: 1 + has_validation]]
    found = hashlib.sha256(read_model(tokenizer)).hexdigest()
    parts = []
    corpora = [IndexedCorpus(prefix) for prefix in prefixes]
    for prefix, corpus in zip(prefixes, corpora, strict=True):
        metadata = _metadata(corpus)
        if metadata is None or metadata.tokenizer != found:
            raise DataRefused(f"{prefix}.json is missing or names another tokenizer than {tokenizer}")
        corpus.check_ids(metadata.vocab_size)
        parts.append(metadata)
    train = parts[0]
    return ReadyData(
        source=ReadySource(name, prefixes[0], prefixes[1] if has_validation else None),
        tokenizer=tokenizer,
        vocab_size=train.vocab_size,
        unigram_entropy=train.unigram_entropy,
        bytes_per_token=train.bytes_per_token,
        fingerprint=corpora[0].fingerprint(),
    )


def _fingerprint(name: str, documents: Sequence[Document], config: DataConfig) -> str:
    """SHA-256, in hex, of everything that the prepared files depend on."""
    settings = (_PREPARATION, sentencepiece.__version__, name, config.vocab_size, config.held_out, config.shuffle_seed)
    digest = hashlib.sha256(repr(settings).encode())
    for document in documents:
        digest.update(hashlib.sha256(document.path.encode()).digest())
        digest.update(hashlib.sha256(document.text.encode()).digest())
    return digest.hexdigest()


def _build(target: Path, documents: Sequence[Document], config: DataConfig, say: Say, note: Say) -> None:
    """Fills the folder `target`."""
    training, validation = stdlib.split(documents, config.held_out)
    training = stdlib.shuffled(training, config.shuffle_seed)
    megabytes = sum(len(document.text.encode()) for document in training) / 1e6
    state = f"training a tokenizer of {config.vocab_size:,} entries on {megabytes:.1f} MB"
    say(state)
    note(state)
    tokenizer = train_sentencepiece(
        (document.text for document in training), config.vocab_size, target / "tokenizer.model"
    )
    for part, chosen in (("train", training), ("validation", validation)):
        if chosen:
            shown = tracked(chosen, len(chosen), f"encoding {part} documents", say, note)
            _encode(target / part, shown, tokenizer)


def _encode(prefix: Path, documents: Iterator[Document], tokenizer: Tokenizer) -> None:
    size = 0
    with CorpusWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for document in documents:
            writer.add_document([*tokenizer.encode(document.text), tokenizer.eod])
            size += len(document.text.encode())
        writer.finish(tokenizer.fingerprint, tokenizer.vocab_size, size)


def _prepare_once(folder: Path, build: Callable[[Path, Say], None], say: Say) -> None:
    """Makes sure that `folder` exists, built by one process of all that ask for it."""
    if folder.is_dir():
        return
    with _disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f".{folder.name}.lock"), f"preparing {folder.name}", say) as note:
            if folder.is_dir():
                return
            if note:  # under the lock, a temporary folder that is there belongs to a process that died
                for left in folder.parent.glob(f".{folder.name}.*.tmp"):
                    shutil.rmtree(left, ignore_errors=True)
            _build_beside(folder, build, note or say)
    say(f"prepared {folder}")


def _build_beside(folder: Path, build: Callable[[Path, Say], None], note: Say) -> None:
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.mkdir()
        build(temporary, note)
        sync(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Without locks another process may have been faster: its folder holds the same.
            if not folder.is_dir():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataRefused(
            f"the data cache {cache} cannot be written ({error.strerror or error}): make room "
            "or make it writable, or set data.cache to another folder"
        ) from error
