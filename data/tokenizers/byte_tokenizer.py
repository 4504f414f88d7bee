"""Bytes as tokens: no file, no vocabulary to train, any text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from data.tokenizers.utf8 import to_utf8

BYTES = "bytes"
"""What names this tokenizer where others have a path."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and the end of a document as number 256."""

    path = BYTES
    vocab_size = 257
    eod = 256
    fingerprint = hashlib.sha256(b"tatara: 256 bytes and an end of document").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Bytes of `text`, without an end-of-document token."""
        return list(to_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Bytes of each text, int32 [bytes]."""
        return [np.frombuffer(to_utf8(text), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; the end of a document gives none, bytes that are no UTF-8 a replacement character."""
        return bytes(token for token in ids if token < self.eod).decode(errors="replace")
