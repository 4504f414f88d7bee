"""The small .json beside a corpus: what its token ids mean and how much text they hold."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import DataRefused
from files import write_whole

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


@dataclass(frozen=True)
class CorpusMetadata:
    """What the token files themselves cannot say, and counts to recognise them by."""

    tokenizer: str
    """SHA-256 of the tokenizer's model file, in hex."""
    dtype: str
    """Type of a token on disk, as numpy names it."""
    tokens: int
    """Tokens in the corpus, end-of-document tokens included."""
    documents: int
    """Documents in the corpus."""
    bytes_of_text: int
    """UTF-8 bytes that the tokens stand for."""
    unigram_entropy: float
    """Entropy of the token frequencies, in nats a token: the loss of a model that only counts."""
    vocab_size: int
    """Entries of the tokenizer; every id is below it."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text a token."""
        return self.bytes_of_text / self.tokens


def with_suffix(prefix: Path, suffix: str) -> Path:
    """The file of a corpus: `prefix` may hold dots, so the suffix is appended, never exchanged."""
    return prefix.with_name(prefix.name + suffix)


def write_metadata(prefix: Path, metadata: CorpusMetadata) -> None:
    """Writes the .json beside the corpus at `prefix`."""
    write_whole(with_suffix(prefix, ".json"), json.dumps(dataclasses.asdict(metadata), indent=2) + "\n")


def read_metadata(prefix: Path) -> CorpusMetadata | None:
    """The .json beside the corpus at `prefix`, or None where there is none (a corpus made elsewhere).

    Raises DataRefused for a file that cannot be read, is not JSON, or lacks or mistypes a field.
    """
    path = with_suffix(prefix, ".json")
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataRefused(
            f"{path} cannot be read as JSON ({error}): restore it, or delete it if the corpus "
            "was not made by this repository's preparation"
        ) from error
    return _typed(path, fields)


def _typed(path: Path, fields: object) -> CorpusMetadata:
    if not isinstance(fields, dict):
        raise DataRefused(f"{path} holds a {type(fields).__name__}, not an object: restore or delete it")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(CorpusMetadata):
        value = fields.get(field.name)
        if not isinstance(value, _KINDS[str(field.type)]) or isinstance(value, bool):
            raise DataRefused(
                f"{path}: {field.name} is {value!r}, but must be a {field.type}: restore the "
                "file from where the corpus was prepared, or delete it"
            )
        values[field.name] = value
    return CorpusMetadata(**values)
