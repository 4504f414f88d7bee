"""Hugging Face's tokenizer.json: the library `tokenizers` says which ids are right, a faster one makes most of them.

    text --> FastBpe (gigatoken)  where the two are known to agree        audited all along
         `-> tokenizers           all else, and every tokenizer that gigatoken does not know

No text can spell a control token: a page that says "<|endoftext|>" is encoded as those characters. Nothing is put
before or after a text, whatever the file's post-processor would.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from data.progress import Say
from data.tokenizers.end_of_document import end_of_document
from data.tokenizers.fast_bpe import FastBpe, fast_bpe
from data.tokenizers.utf8 import to_utf8
from errors import DataRefused

_REFERENCE_ONLY = "TATARA_TOKENIZER"
_AUDIT_AT_FIRST = 1 << 16  # characters
_AUDIT_ONE_IN = 512  # texts; the reference is some 100 times slower, so that this costs a fifth of the time
_AUDIT_LONGEST = 20_000  # characters of a text
Ids = npt.NDArray[np.int32]


class JsonTokenizer:
    """A tokenizer.json, from its path and content; `say` is told if it will be slow. Raises DataRefused."""

    def __init__(self, path: Path, content: bytes, say: Say) -> None:
        self.path = path
        self.fingerprint = hashlib.sha256(content).hexdigest()
        definition = _definition(path, content)
        self._end = end_of_document(path, definition)
        definition = _with_control(definition, self._end.token)
        self._reference = _reference(path, definition)
        self._end_id = self._reference.token_to_id(self._end.token) if self._end.token is not None else None
        self.vocab_size = 1 + max(self._reference.get_vocab(with_added_tokens=True).values())
        self._audited = 0
        self._fast = self._fast_way(definition, say)

    @property
    def eod(self) -> int:
        """Id of the end-of-document token. Raises DataRefused where there is none, or none can be told."""
        if self._end_id is None:
            raise DataRefused(self._end.refusal)
        return self._end_id

    @property
    def fast(self) -> bool:
        """Whether most texts take the fast way."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document token, whatever the text spells."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, int32 [tokens], on this thread alone.

        Raises:
            DataRefused: a text is no Unicode; or its ids hold the end of a document; or an audit found that the fast
                way gives other ids than the reference.
        """
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens such as the end of a document give no text."""
        return self._reference.decode([int(token) for token in ids], skip_special_tokens=True)

    def _encode(self, text: str) -> Ids:
        try:
            ids = self._fast.encode(text) if self._fast else None
        except UnicodeEncodeError:
            to_utf8(text)  # refuses
            raise
        if self._fast and ids is not None and self._is_audited(text):
            self._audit(text, ids)
        ids = self._encode_slowly(text) if ids is None else ids
        if self._end_id is not None and (ids == self._end_id).any():
            raise DataRefused(
                f"{self.path} gives the end of a document, id {self._end_id}, inside of a text that begins with "
                f"{text[:40]!r}: documents would be cut there; name another end as eos_token in a "
                "tokenizer_config.json beside it"
            )
        return ids

    def _encode_slowly(self, text: str) -> Ids:
        to_utf8(text)
        try:
            return np.array(self._reference.encode(text, add_special_tokens=False).ids, np.int32)
        except Exception as error:  # the library raises nothing more special
            raise DataRefused(
                f"the tokenizer {self.path} has no ids for a text that begins with {text[:40]!r} ({error}): it lacks "
                "an entry for unknown words, say; mend it or give another"
            ) from error

    def _is_audited(self, text: str) -> bool:
        """The first texts, then some that follow from the text alone, in whichever process it is encoded."""
        if self._audited < _AUDIT_AT_FIRST:
            return True
        return zlib.crc32(f"{len(text)} {text[-64:]}".encode()) % _AUDIT_ONE_IN == 0

    def _audit(self, text: str, ids: Ids) -> None:
        """Compare the two libraries on (the beginning of) a text."""
        beginning = text[:_AUDIT_LONGEST]
        found: Ids | None = ids
        if len(beginning) < len(text) and self._fast:
            found = self._fast.encode(beginning)
        self._audited += len(beginning)
        right = self._encode_slowly(beginning)
        if found is not None and not np.array_equal(found, right):
            raise DataRefused(
                f"gigatoken and tokenizers give other ids with {self.path} for a text that begins with "
                f"{text[:40]!r} ({len(found):,} and {len(right):,} tokens): what was encoded before may hold the same "
                f"fault; set the environment variable {_REFERENCE_ONLY}=reference, which leaves all to tokenizers "
                "(exact, some 50 times slower), and prepare the texts anew"
            )

    def _fast_way(self, definition: dict[str, Any], say: Say) -> FastBpe | None:
        """The fast way, or None with a word why."""
        if os.environ.get(_REFERENCE_ONLY) == "reference":
            say(f"slow tokenizer: {_REFERENCE_ONLY}=reference leaves {self.path} to tokenizers alone (1 to 2 MB/s)")
            return None
        found = fast_bpe(definition, self._reference)
        if isinstance(found, FastBpe):
            return found
        say(f"slow tokenizer: {self.path} is left to tokenizers alone (1 to 2 MB/s a process), because {found}")
        return None


def _definition(path: Path, content: bytes) -> dict[str, Any]:
    try:
        definition = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataRefused(f"the tokenizer {path} is damaged, its JSON is broken ({error}): copy it again") from error
    if not isinstance(definition, dict) or not isinstance(definition.get("model"), dict):
        raise DataRefused(
            f"{path} is JSON, but no tokenizer: it has no `model`; give the tokenizer.json that the library "
            "tokenizers writes (not the model's config, nor vocab.json)"
        )
    if definition["model"].get("dropout"):
        raise DataRefused(
            f"{path} has model.dropout={definition['model']['dropout']}: it cuts words by chance, so that the same "
            'text has other ids each time; use a copy of it with "dropout": null'
        )
    return definition | {"added_tokens": definition.get("added_tokens") or []}


def _with_control(definition: dict[str, Any], end: str | None) -> dict[str, Any]:
    """The definition with the end of a document as a control token, which texts cannot spell."""
    added = [token | {"special": token["special"] or token["content"] == end} for token in definition["added_tokens"]]
    return definition | {"added_tokens": added}


def _reference(path: Path, definition: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        reference = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing more special
        raise DataRefused(
            f"the tokenizer {path} cannot be read by tokenizers {tokenizers.__version__} ({error}): give a whole "
            "tokenizer.json, or install the version that wrote it"
        ) from error
    reference.encode_special_tokens = True  # control tokens' names in a text are text
    reference.no_truncation()
    reference.no_padding()
    return reference
