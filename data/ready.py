"""Makes a run's data ready: opens corpora on disk, prepares texts on first use, and sees that all speak one vocabulary.

    cache/tokenizer-<16 hex>/tokenizer.model        where data.tokenizer is null
    cache/<source>-<16 hex>/train.bin train.idx train.json   validation.bin ...

A folder's name is a fingerprint of everything that its content depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import sentencepiece

from data.cache import disk_errors, prepare_once
from data.config import DataConfig, SourceConfig
from data.corpus.indexed import IndexedCorpus
from data.corpus.joined import Corpus, open_corpus
from data.corpus.metadata import CorpusMetadata, read_metadata
from data.corpus.writer import entropy
from data.preparing.preparation import Preparation, is_prepared, prepare
from data.preparing.shuffle import content_digest, held_out_limit, sides, words
from data.preparing.workers import cores
from data.progress import Say
from data.texts.documents import documents_of
from data.texts.origin import Origin
from data.texts.origins import origin_of
from data.tokenizers.byte_tokenizer import BYTES
from data.tokenizers.tokenizer import Tokenizer, load_tokenizer, tokenizer_file, train_sentencepiece
from errors import DataRefused

_ENTROPY_SAMPLE = 4_000_000
_TOKENIZER_BYTES = 50_000_000
_MODEL, _SUM = "tokenizer.model", "tokenizer.sha256"
_PREPARATION = 2
"""Raised whenever the same texts and settings would give another tokenizer or other tokens."""


@dataclass(frozen=True)
class ReadySource:
    """A source that can be opened."""

    name: str
    """Its name in the configuration."""
    train: str
    """Prefix of the training corpus, or a pattern of prefixes."""
    validation: str | None
    """Prefix of the held-out corpus, likewise, if there is one."""
    fingerprint: str
    """Identifies the training corpus's content, in hex."""
    held_out_fingerprint: str | None
    """That of the held-out corpus, if there is one."""
    unigram_entropy: float
    """Entropy of its token frequencies in nats a token; of some 4 million tokens where no .json tells."""
    held_out_bytes_per_token: float | None
    """UTF-8 bytes of text a token of the held-out corpus; None where no .json tells."""


@dataclass(frozen=True)
class ReadyData:
    """Data that was found, opened and checked."""

    sources: tuple[ReadySource, ...]
    """In the order of the configuration."""
    tokenizer: str | None
    """What `load_tokenizer` takes; None: unknown."""
    vocab_size: int
    """Entries of the vocabulary; every id is below it."""
    tokenizer_fingerprint: str | None = None
    """Hash of the tokenizer that made the ids, in hex; None: unknown."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of the tokenizer, by the files' names there; the tokenizer itself is the first."""
        if self.tokenizer is None or self.tokenizer == BYTES:
            return {}
        file = tokenizer_file(self.tokenizer)
        beside = file.with_name("tokenizer_config.json")
        if file.suffix != ".json":
            return {"tokenizer.model": file.read_bytes()}
        more = {beside.name: beside.read_bytes()} if beside.is_file() else {}
        return {"tokenizer.json": file.read_bytes(), **more}

    @property
    def fingerprint(self) -> str:
        """Identifies all of it, held-out corpora included, in hex."""
        parts = (f"{each.name} {each.fingerprint} {each.held_out_fingerprint}" for each in self.sources)
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def ready(
    config: DataConfig, say: Say, model_vocab: int | None = None, root: Path | None = None, tokenizer: str | None = None
) -> ReadyData:  # fmt: skip
    """Finds, opens and checks the data of `config`, and prepares texts on first use.

    Any number of processes may call it at once: one a file system prepares, the others wait. `say` prints a
    line. `model_vocab`: entries that the model is set to have, for corpora that do not tell theirs. `root`:
    folder that a corpus that needs no download reads; None: its usual one. `tokenizer`: in the place of one that
    would be trained here. Raises DataRefused.
    """
    origins = {each.name: origin_of(each, root=root) for each in config.sources if each.prefix is None}
    given = config.tokenizer or tokenizer
    if given is None and origins:
        given = str(_trained_tokenizer(config, origins, say))
    known = load_tokenizer(given, say) if given else None
    found = []
    for source in config.sources:
        places = (source.prefix or "", source.validation)
        if known is not None and source.name in origins:
            places = _prepared(config, source, origins[source.name], known, say)
        corpora = (open_corpus(places[0]), open_corpus(places[1]) if places[1] else None)
        found.append(_Found(source.name, places, corpora, tuple(_described(c) if c else None for c in corpora)))
    vocab_size = _vocabulary(config, found, known, model_vocab)
    for each in found:
        for corpus in filter(None, each.corpora):
            corpus.check_ids(vocab_size)
    return ReadyData(tuple(each.ready() for each in found), given, vocab_size, _fingerprint_of_tokenizer(known, found))


@dataclass(frozen=True)
class _Found:
    """A source's corpora, for training and held out, and what their .json files say."""

    name: str
    places: tuple[str, str | None]
    corpora: tuple[Corpus, Corpus | None]
    described: tuple[CorpusMetadata | None, ...]

    def ready(self) -> ReadySource:
        (corpus, held), (training, held_out) = self.corpora, self.described
        return ReadySource(
            self.name, *self.places, corpus.fingerprint(), held.fingerprint() if held else None,
            training.unigram_entropy if training else _sampled_entropy(corpus),
            held_out.bytes_per_token if held_out else None,
        )  # fmt: skip


def _vocabulary(
    config: DataConfig, found: Sequence[_Found], tokenizer: Tokenizer | None, model_vocab: int | None
) -> int:  # fmt: skip
    """Entries of the one vocabulary that all corpora share.

    Raises:
        DataRefused: they have different tokenizers, none is known, or the model has too few entries.
    """
    named = [
        (f"the corpus {corpus.prefix}", told)
        for each in found
        for corpus, told in zip(each.corpora, each.described, strict=True)
        if corpus and told
    ]
    first = (f"data.tokenizer={tokenizer.path}", tokenizer.fingerprint) if tokenizer else None
    for name, told in named:
        first = first or (name, told.tokenizer)
        if told.tokenizer != first[1]:
            raise DataRefused(
                f"{first[0]} has SHA-256 {first[1][:16]}..., but {name} was made with {told.tokenizer[:16]}...: its "
                "ids would mean other text; give the tokenizer that made it, or prepare all corpora with one"
            )
    known = tokenizer.vocab_size if tokenizer else named[0][1].vocab_size if named else model_vocab
    if known is None:
        raise DataRefused(
            f"the vocabulary of {found[0].corpora[0].prefix} is unknown (no .json beside it): set data.tokenizer, or "
            "model.vocab_size"
        )
    if model_vocab is not None and known > model_vocab:
        raise DataRefused(
            f"the data's vocabulary has {known} entries, but model.vocab_size is {model_vocab}: raise it, or leave it "
            "null, to be taken from the data"
        )
    return known


def _fingerprint_of_tokenizer(tokenizer: Tokenizer | None, found: Sequence[_Found]) -> str | None:
    if tokenizer is not None:
        return tokenizer.fingerprint
    return next((told.tokenizer for each in found for told in each.described if told), None)


def _described(corpus: Corpus) -> CorpusMetadata | None:
    """What the .json files beside a corpus say together; None unless each of its parts has one.

    Raises:
        DataRefused: a .json describes other files, or parts were made with different tokenizers.
    """
    told = [_metadata(part) for part in corpus.parts]
    whole = [each for each in told if each is not None]
    if len(whole) < len(told):
        return None
    for part, each in zip(corpus.parts, whole, strict=True):
        if each.tokenizer != whole[0].tokenizer:
            raise DataRefused(
                f"{part.prefix} was made with another tokenizer than {corpus.parts[0].prefix}: one source has one; "
                "prepare both with the same"
            )
    if len(whole) == 1:
        return whole[0]
    return replace(
        whole[0], tokens=corpus.tokens, documents=corpus.documents,
        bytes_of_text=sum(each.bytes_of_text for each in whole), unigram_entropy=_sampled_entropy(corpus),
    )  # fmt: skip


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


def _sampled_entropy(corpus: Corpus) -> float:
    _, counts = np.unique(corpus.sample(_ENTROPY_SAMPLE), return_counts=True)
    return entropy(counts)


def _prepared(
    config: DataConfig, source: SourceConfig, origin: Origin, tokenizer: Tokenizer, say: Say
) -> tuple[str, str | None]:
    """Prefixes of a source that is prepared here, for training and held out."""
    made_by = (tokenizer.fingerprint, tokenizer.eod)
    settings = (_PREPARATION, *made_by, config.held_out, config.shuffle_seed, source.max_documents)
    folder = _folder(config, source.name, origin.fingerprint(), settings)
    held_out = folder / "validation" if config.held_out else None
    plan = Preparation(
        origin, str(tokenizer.path), folder / "train", held_out, config.held_out or 0.5, seed=config.shuffle_seed,
        workers=config.workers or cores(), overwrite=True,
    )  # fmt: skip
    if not is_prepared(plan):
        with disk_errors(folder):
            report = prepare(plan, say)
        for line in report.table().splitlines():
            say(f"  {line}")
        say(f"  all of it: {plan.output}.report.json")
    return str(plan.output), str(held_out) if held_out else None


def _trained_tokenizer(config: DataConfig, origins: Mapping[str, Origin], say: Say) -> Path:
    """The tokenizer of texts that come without one, trained on first use."""
    settings = (_PREPARATION, sentencepiece.__version__, config.vocab_size, config.held_out)
    folder = _folder(config, "tokenizer", " ".join(each.fingerprint() for each in origins.values()), settings)

    def build(target: Path, note: Say) -> None:
        state = f"training a tokenizer of {config.vocab_size:,} entries on {', '.join(origins)}"
        say(state)
        note(state)
        share = _TOKENIZER_BYTES // len(origins)
        texts = (text for each in origins.values() for text in _first_texts(each, share, config.held_out))
        made = train_sentencepiece(texts, config.vocab_size, target / _MODEL)
        (target / _SUM).write_text(made.fingerprint, encoding="utf-8")

    prepare_once(folder, build, _has_whole_tokenizer, say)
    return folder / _MODEL


def _has_whole_tokenizer(folder: Path) -> bool:
    """Whether the tokenizer in it is the one that was written."""
    try:
        found = hashlib.sha256((folder / _MODEL).read_bytes()).hexdigest()
        return found == (folder / _SUM).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _first_texts(origin: Origin, most_bytes: int, held_out: float) -> Iterator[str]:
    """The first texts of an origin that are not held out, as many bytes as are asked for."""
    limit, read = held_out_limit(held_out, 0), 0
    for document in documents_of(origin):
        content = document.text.encode()
        if sides(words([content_digest(content)])[:, 0])[0] > limit:
            read += len(content)
            if read > most_bytes:
                return
            yield document.text


def _folder(config: DataConfig, name: str, texts: str, settings: object) -> Path:
    fingerprint = hashlib.sha256(f"{texts} {settings!r}".encode()).hexdigest()
    return Path(config.cache).expanduser() / f"{name}-{fingerprint[:16]}"
