"""Text to token ids and back: one interface for sentencepiece models, Hugging Face's tokenizer.json, and bytes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data.progress import Say
from data.tokenizers.byte_tokenizer import BYTES, ByteTokenizer
from data.tokenizers.json_tokenizer import JsonTokenizer
from data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from errors import DataRefused

__all__ = ["Tokenizer", "load_tokenizer", "read_model", "tokenizer_file", "train_sentencepiece"]

_FILES_OF_A_FOLDER = ("tokenizer.json", "tokenizer.model")


class Tokenizer(Protocol):
    """What every kind of tokenizer does."""

    @property
    def path(self) -> str | Path:
        """The file that it was loaded from; `bytes` for bytes."""

    @property
    def vocab_size(self) -> int:
        """Entries of its vocabulary; every id is below it."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its file, in hex; for bytes a fixed one."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token. Raises DataRefused where there is none, or none can be told."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document token, whatever the text spells.

        Raises DataRefused for a text that is no Unicode (a lone surrogate).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The same of each text, int32 [tokens], on this thread alone; the fast way for many. The arrays may be
        read-only."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens such as the end of a document give no text."""


def load_tokenizer(path: str | Path, say: Say | None = None) -> Tokenizer:
    """The tokenizer of a file: a sentencepiece .model, a Hugging Face tokenizer.json (or a folder that holds one of
    these), or the word `bytes`.

    What it is follows from the content, not from the name. `say`: told once if the tokenizer will be slow; None:
    standard error. Raises DataRefused for a missing, damaged or unknown file.
    """
    if str(path) == BYTES:
        return ByteTokenizer()
    file = tokenizer_file(path)
    content = read_model(file)
    if file.suffix == ".json" or re.match(rb'\s*\{\s*"', content):
        return JsonTokenizer(file, content, say or _to_stderr)
    return SentencePieceTokenizer(file, content)


def read_model(path: Path) -> bytes:
    """Bytes of a tokenizer's file. Raises DataRefused when it is missing, empty or unreadable."""
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataRefused(
            f"the tokenizer {path} cannot be read ({error.strerror}): set data.tokenizer to a sentencepiece .model "
            f"file, a Hugging Face tokenizer.json, or {BYTES}"
        ) from error
    if not model:
        raise DataRefused(f"the tokenizer {path} is empty: copy or train it again")
    return model


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer's file in a folder, or the path itself. Raises DataRefused for a folder without one."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    found = [path / name for name in _FILES_OF_A_FOLDER if (path / name).is_file()]
    if not found:
        raise DataRefused(
            f"the folder {path} holds no {' and no '.join(_FILES_OF_A_FOLDER)}: set data.tokenizer to a tokenizer's "
            "file, or to a folder with one of these"
        )
    return found[0]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
