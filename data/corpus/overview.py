"""What there is to say of a corpus: counts, lengths, how documents end, what lies beside it, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from data.corpus.indexed import IndexedCorpus, spaced
from data.corpus.joined import Corpus
from data.corpus.lengths import LengthCounts, LengthStatistics, document_lengths
from data.corpus.metadata import CorpusMetadata, read_metadata, with_suffix
from data.corpus.verify import FullCheck, checksums
from data.progress import Meter, Say
from data.tokenizers.tokenizer import Tokenizer
from errors import DataRefused

_ENDS = 4096
_SAMPLE_IDS = 256


@dataclass(frozen=True)
class PartOverview:
    """One .bin/.idx."""

    prefix: str
    """Its path without the endings."""
    documents: int
    """Their number."""
    tokens: int
    """Their number."""
    bytes: int
    """Of .bin and .idx together."""
    metadata: CorpusMetadata | None
    """What its .json says; None where there is none or it cannot be read."""
    sha256: dict[str, str] | None
    """Of "bin" and of "idx", in hex; None: not asked for."""


@dataclass(frozen=True)
class Ends:
    """The last tokens of documents."""

    looked_at: int
    """Documents looked at, of those that have tokens."""
    documents: dict[int, int]
    """How many of them end with an id, for the ten most frequent."""
    elsewhere: int | None
    """How often the most frequent one stands inside of documents; None: not counted."""


@dataclass(frozen=True)
class Sample:
    """A document's beginning."""

    document: int
    """Its number, from 0."""
    tokens: int
    """Its length."""
    ids: tuple[int, ...]
    """Its first ids, up to 256."""
    text: str | None
    """Their text; None without a tokenizer, or where an id is none of its own."""


@dataclass(frozen=True)
class Overview:
    """A corpus."""

    prefix: str
    """Its path without the endings, or the pattern that names its parts."""
    documents: int
    """Their number."""
    tokens: int
    """Their number."""
    dtype: str
    """Type of a token on disk."""
    bytes: int
    """Of all files."""
    lengths: LengthStatistics
    """Of documents, in tokens."""
    ends: Ends
    """How documents end."""
    fingerprint: str
    """What a run remembers it by."""
    vocab_size: int | None
    """Ids must be below it; None: not known."""
    largest_id: int | None
    """Of all tokens; None: not looked at."""
    verified: bool
    """Whether everything was looked at."""
    samples: tuple[Sample, ...]
    """The first documents."""
    parts: tuple[PartOverview, ...]
    """In the order of the stream."""
    faults: tuple[str, ...]
    """What is wrong, in words."""


@dataclass(frozen=True)
class Asked:
    """How much is to be looked at."""

    samples: int
    """Documents to show."""
    vocab_size: int | None
    """Entries of the vocabulary; None: as the tokenizer or a .json says."""
    verify: bool
    """Whether every entry and every token is checked."""
    checksums: bool
    """Whether files are hashed whole."""


def overview(corpus: Corpus, asked: Asked, tokenizer: Tokenizer | None, say: Say) -> Overview:
    """Look at a corpus.

    say: is told how far it is, every few seconds.

    Raises:
        DataRefused: the index is too damaged to tell documents apart.
    """
    beside = [_beside(part, tokenizer) for part in corpus.parts]
    faults = [fault for _, found in beside for fault in found]
    known = [metadata for metadata, _ in beside if metadata]
    faults += _tokenizers_differ(corpus, known)
    vocab_size = asked.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    vocab_size = vocab_size or max((each.vocab_size for each in known), default=None)
    ends, largest = sampled_ends(corpus), None
    if asked.verify:
        checks = _verified(corpus, vocab_size, next(iter(ends.documents), None), say)
        faults += [fault for check in checks for fault in check.faults]
        ends, largest = _all_ends(checks), max(check.largest for check in checks)
    elif vocab_size is not None:
        faults += _sampled_ids(corpus, vocab_size)
    sums = _checksums(corpus, say) if asked.checksums else [None] * len(corpus.parts)
    parts = [_part(part, says, sha) for part, (says, _), sha in zip(corpus.parts, beside, sums, strict=True)]
    return Overview(
        prefix=str(corpus.prefix), documents=corpus.documents, tokens=corpus.tokens, dtype=corpus.dtype.name,
        bytes=sum(part.bytes for part in parts), lengths=_lengths(corpus, say), ends=ends,
        fingerprint=corpus.fingerprint(), vocab_size=vocab_size, largest_id=largest, verified=asked.verify,
        samples=tuple(_samples(corpus, asked.samples, tokenizer)), parts=tuple(parts), faults=tuple(faults),
    )  # fmt: skip


def sampled_ends(corpus: Corpus) -> Ends:
    """How some thousand evenly spaced documents end, two or more of each part."""
    places = max(2, _ENDS // len(corpus.parts))
    found: Counter[int] = Counter()
    for part in corpus.parts:
        for document in spaced(part.documents, 1, places):
            begin, end = part.document_starts(document, document + 2).tolist()
            if begin < end:
                found[int(part.read(end - 1, end)[0])] += 1
    return Ends(found.total(), dict(found.most_common(10)), None)


def _beside(part: IndexedCorpus, tokenizer: Tokenizer | None) -> tuple[CorpusMetadata | None, list[str]]:
    """What the .json says, and where it is wrong."""
    try:
        metadata = read_metadata(part.prefix)
    except DataRefused as refusal:
        return None, [str(refusal)]
    if metadata is None:
        return None, []
    faults, path = [], with_suffix(part.prefix, ".json")
    told = (metadata.tokens, metadata.documents, metadata.dtype)
    found = (part.tokens, part.documents, part.dtype.name)
    if told != found:
        faults.append(
            f"{path} tells of (tokens, documents, dtype) {told}, but the corpus has {found}: the .json belongs to "
            "other files; copy or prepare the corpus again"
        )
    if tokenizer and metadata.tokenizer != tokenizer.fingerprint:
        faults.append(
            f"{path} names the tokenizer {metadata.tokenizer[:16]}..., but the one given is "
            f"{tokenizer.fingerprint[:16]}...: ids would mean other text; give the tokenizer that made the corpus"
        )
    return metadata, faults


def _tokenizers_differ(corpus: Corpus, known: Sequence[CorpusMetadata]) -> list[str]:
    names = sorted({each.tokenizer for each in known})
    if len(names) < 2:
        return []
    shown = ", ".join(f"{name[:16]}..." for name in names[:4])
    return [
        f"the parts of {corpus.prefix} were made with {len(names)} tokenizers ({shown}): give them as separate "
        "sources, or prepare them again with one"
    ]


def _sampled_ids(corpus: Corpus, vocab_size: int) -> list[str]:
    try:
        corpus.check_ids(vocab_size)
    except DataRefused as refusal:
        return [str(refusal)]
    return []


def _verified(corpus: Corpus, vocab_size: int | None, end: int | None, say: Say) -> list[FullCheck]:
    checks = [FullCheck(part, vocab_size, end) for part in corpus.parts]
    total, done = sum(part.bin_bytes.size + part.idx_bytes.size for part in corpus.parts), 0
    with Meter(f"verifying {corpus.prefix}", say, _unheard) as meter:
        for check in checks:
            for size in check.steps():
                done += size
                meter.update(done, total)
    return checks


def _all_ends(checks: Sequence[FullCheck]) -> Ends:
    found = sum((check.ends for check in checks), Counter[int]())
    common = found.most_common(10)
    inside = sum(check.common for check in checks) - common[0][1] if common else None
    return Ends(found.total(), dict(common), inside)


def _checksums(corpus: Corpus, say: Say) -> list[dict[str, str] | None]:
    total, done = sum(part.bin_bytes.size + part.idx_bytes.size for part in corpus.parts), 0
    sums: list[dict[str, str] | None] = []
    with Meter(f"hashing {corpus.prefix}", say, _unheard) as meter:
        for part in corpus.parts:
            finished = []
            for size, digest in checksums(part):
                finished += [digest] if digest else []
                done += size
                meter.update(done, total)
            sums.append(dict(zip(("bin", "idx"), finished, strict=True)))
    return sums


def _part(part: IndexedCorpus, metadata: CorpusMetadata | None, sha256: dict[str, str] | None) -> PartOverview:
    size = part.bin_bytes.size + part.idx_bytes.size
    return PartOverview(str(part.prefix), part.documents, part.tokens, size, metadata, sha256)


def _lengths(corpus: Corpus, say: Say) -> LengthStatistics:
    counts, done = LengthCounts(), 0
    with Meter(f"lengths of {corpus.documents:,} documents", say, _unheard) as meter:
        for part in corpus.parts:
            for lengths in document_lengths(part):
                counts.add(lengths)
                done += 8 * lengths.size
                meter.update(done, 8 * corpus.documents)
    return counts.statistics()


def _samples(corpus: Corpus, wanted: int, tokenizer: Tokenizer | None) -> list[Sample]:
    found: list[Sample] = []
    for part in corpus.parts:
        count = min(wanted - len(found), part.documents)
        starts = part.document_starts(0, count + 1).tolist()
        for begin, end in pairwise(starts):
            ids = tuple(part.read(begin, min(end, begin + _SAMPLE_IDS)).tolist())
            known = tokenizer is not None and all(0 <= each < tokenizer.vocab_size for each in ids)
            text = tokenizer.decode(ids) if tokenizer and known else None
            found.append(Sample(len(found), end - begin, ids, text))
        if len(found) == wanted:
            break
    return found


def _unheard(_: str) -> None:
    """Nobody waits for this process."""
