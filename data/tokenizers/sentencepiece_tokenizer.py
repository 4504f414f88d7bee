"""sentencepiece models: encoding, decoding, training."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import sentencepiece

from data.tokenizers.utf8 import to_utf8
from errors import DataRefused
from files import sync

# sentencepiece writes a space as this character, so that text which holds it would come back changed.
_SPACE_MARK = "\u2581"
Kind = Literal["bpe", "unigram"]


class SentencePieceTokenizer:
    """A sentencepiece model, from its file's path and content. Raises DataRefused for a damaged one."""

    def __init__(self, path: Path, model: bytes) -> None:
        self.path = path
        self.fingerprint = hashlib.sha256(model).hexdigest()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise DataRefused(
                f"{self.path} is neither a sentencepiece model ({error}) nor a tokenizer.json: set data.tokenizer to "
                "the file that made the corpus"
            ) from error
        self.vocab_size: int = self._processor.vocab_size()
        self._mark_ids = self._exact_mark_ids()

    @property
    def eod(self) -> int:
        """Id of the end-of-document token (`</s>`). Raises DataRefused for a model that has none."""
        eod: int = self._processor.eos_id()
        if eod < 0:
            raise DataRefused(
                f"{self.path} has no end-of-sequence token, which ends documents: use a model "
                "with </s> (sentencepiece: eos_id >= 0)"
            )
        return eod

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document token."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Ids of each text, int32 [tokens], on this thread alone."""
        marked = [number for number, text in enumerate(texts) if self._mark_ids and _SPACE_MARK in text]
        if not marked:
            return self._encode(list(texts))
        parts = list(texts)
        for number in marked:
            parts[number] = ""
        encoded = self._encode(parts)
        for number in marked:
            encoded[number] = self._encode_marked(texts[number])
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens such as the end of a document give no text."""
        text: str = self._processor.decode([int(token) for token in ids])
        return text

    def _encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        try:
            ids: list[npt.NDArray[np.int32]] = self._processor.encode(texts, num_threads=1, return_type="numpy")
        except TypeError:
            for text in texts:
                to_utf8(text)  # refuses the text that sentencepiece could not read
            raise
        return ids

    def _encode_marked(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of a text with space marks, each as its bytes."""
        mark = np.array(self._mark_ids, np.int32)
        parts = self._encode(text.split(_SPACE_MARK))
        return np.concatenate([parts[0], *(piece for part in parts[1:] for piece in (mark, part))])

    def _exact_mark_ids(self) -> list[int]:
        """Byte tokens of the space mark, for a model that keeps whitespace and knows bytes; else none."""
        probe = " \n  a"
        pieces = [f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode()]
        ids = [self._processor.piece_to_id(piece) for piece in pieces]
        exact = self._processor.decode(self._processor.encode(probe)) == probe
        return ids if exact and all(map(self._processor.is_byte, ids)) else []


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, out_path: Path, kind: Kind = "bpe"
) -> SentencePieceTokenizer:
    """Trains a tokenizer that keeps every byte of its text, and writes it to `out_path`, whole or not at all.

    The same texts in the same order give the same file. Ids: unknown 0, `</s>` 1, 256 bytes, then pieces.
    Raises DataRefused when the texts cannot fill `vocab_size` entries or need more, or the file cannot be written.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            byte_fallback=True,
            character_coverage=0.9999,
            # Whitespace has a meaning in code: nothing is normalised or dropped, and indentation is a token.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # Pieces such as "self." or "():": 12% fewer tokens on Python than with scripts kept apart.
            split_by_unicode_script=False,
            # One thread, no sampling: deterministic. A text is a whole document.
            num_threads=1,
            max_sentence_length=1 << 30,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise DataRefused(
            f"a tokenizer of {vocab_size} entries cannot be trained on this text ({error}): a "
            "vocabulary needs at least 258 entries and one for each frequent character, and "
            "enough text for the rest; change the size (data.vocab_size, --vocab-size) or give more text"
        ) from error
    _write(out_path, model.getvalue())
    return SentencePieceTokenizer(out_path, model.getvalue())


def _write(path: Path, model: bytes) -> None:
    """Write a file beside, and rename it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(model)
        sync(beside)
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise DataRefused(
            f"the tokenizer {path} cannot be written ({error.strerror}): make room, or choose a folder that is there "
            "and can be written"
        ) from error
