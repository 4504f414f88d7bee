"""Which code points two libraries treat alike when they cut a text into words, found out by asking both.

    "a" + c + "a", "1" + c + "1", " " + c + " ", "'" + c + "a", ...  --> the same cuts by both, or c is not safe

The cuts are made visible by a vocabulary in which any two bytes that meet at a border of c are merged, unless a cut
keeps them apart. How a word is cut follows from the kinds of its code points (letter, number, space, ...), so code
points that are cut alike in all these places are of one kind for both. Only code points that turn up are asked about.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

KNOWN, SAFE, INERT = 1, 2, 4
"""Asked about already; cut alike; never changed by the normaliser, whatever stands beside it."""

_NEIGHBOURS = "aA1 .\n'"
_PLACES = "a{0}a A{0}A 1{0}1 {0} .{0}. \n{0}\n '{0}a '{0}{0}a 's{0} 1{0}a a{0}1 {0}'s \u4e2d{0}\u4e2d e\u0301{0}\u0301"
_CODE_POINTS = 0x110000


class CodePoints:
    """Flags (KNOWN, SAFE, INERT) of every code point, for one pre-tokenizer and one normaliser.

    `pre_tokenizer`: as in a tokenizer.json. `normalizer`: None or a Unicode form. `other`: makes the other library's
    function from a text to ids out of a tokenizer.json's content.
    """

    def __init__(
        self,
        pre_tokenizer: dict[str, Any],
        normalizer: tokenizers.normalizers.Normalizer | None,
        other: Callable[[str], Callable[[str], npt.NDArray[np.uint32]]],
    ) -> None:
        definition = _probe(pre_tokenizer)
        self._reference = tokenizers.Tokenizer.from_str(definition)
        self._other = other(definition)
        self._normalizer = normalizer
        self._flags = np.zeros(_CODE_POINTS, np.uint8)
        self._flags[:128] = KNOWN | SAFE | INERT  # ASCII is compared when the tokenizer is loaded

    def common(self, text: str) -> int:
        """Flags that all code points of a text have. Raises UnicodeEncodeError for a lone surrogate."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        flags = int(np.bitwise_and.reduce(self._flags.take(points)))
        if flags & KNOWN:
            return flags
        for point in np.unique(points[self._flags[points] == 0]).tolist():
            self._flags[point] = self._ask(chr(point))
        return int(np.bitwise_and.reduce(self._flags.take(points)))

    def _ask(self, point: str) -> int:
        text = _PLACES.format(point)
        alike = self._other(text).tolist() == self._reference.encode(text, add_special_tokens=False).ids
        return KNOWN | (SAFE if alike else 0) | (INERT if self._is_inert(point) else 0)

    def _is_inert(self, point: str) -> bool:
        """Whether the normaliser never changes it. Marks, Hangul's parts and what this Python does not know may join
        what stands before them."""
        if self._normalizer is None:
            return True
        category = unicodedata.category(point)
        joins = category[0] in "MC" or "\u1100" <= point <= "\u11ff" or "\ud7b0" <= point <= "\ud7ff"
        joins = joins or (category[0] == "L" and point > "\uffff")  # some of the newer scripts have vowels that join
        return not joins and self._normalizer.normalize_str(point) == point


def _probe(pre_tokenizer: dict[str, Any]) -> str:
    """A tokenizer.json with a vocabulary that shows the cuts."""
    letter = _byte_letters()
    vocabulary = {letter[byte]: byte for byte in range(256)}
    pairs = [pair for near in _NEIGHBOURS.encode() for byte in range(256) for pair in ((near, byte), (byte, near))]
    pairs += [(last, first) for last in range(0x80, 0xC0) for first in range(0xC2, 0xF5)]
    merges = [[letter[left], letter[right]] for left, right in dict.fromkeys(pairs)]
    vocabulary |= {left + right: 256 + number for number, (left, right) in enumerate(merges)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False, "fuse_unk": False}
    model |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": pre_tokenizer, "model": model} | rest)


def _byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable ones for themselves."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
