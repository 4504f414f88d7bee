"""Byte-level BPE by gigatoken, some 100 times faster than the reference (the library `tokenizers`), with the same ids.

What may differ does not come this way:
- Control tokens, which gigatoken would find in a text, and post-processors are left out of what it is given.
- Normalisers are run by the reference's own code, wherever they could change a text.
- gigatoken 0.10 knows Unicode 17, tokenizers 0.23 Unicode 16, and either may be another: a text goes the fast way only
  if each of its code points was seen to be split off its neighbours alike by both (data/code_points.py).
- Only kinds of tokenizer.json that gigatoken is known to read rightly are given to it, and only where it then agrees
  with the reference on some thousand short texts, made to be awkward.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from data.tokenizers.code_points import INERT, SAFE, CodePoints

Ids = npt.NDArray[np.int32]
Encode = Callable[[str], npt.NDArray[np.uint32]]

_RENEW_AFTER = 1 << 28  # characters; gigatoken remembers each word it met, some 100 bytes of memory each, for ever
_TRIALS = 300
_OVERLAPPING_AT_MOST = 16  # each is looked for in each text
_TRIAL_PARTS = (
    *"aZs1 .\n", " ", "  ", "    ", "\t", "\r", "\r\n", "\n\n", "'", "'s", "'LL", "'re", "n't", "the", " the", "self",
    "Class", "12", "3456", "_", "-", "==", " (", "/", "#", "\0", "\x0b", "\x1c", "\x7f", "<", "|>",
    *"\u00e9\u00a0\u00bd\u017f\u212a\u05d0\u0663\u0939\u093f\u4e2d\ud55c\u2026\u2028\u3000\u200d\ufeff\U0001f600",
    "e\u0301", "\u4e2d\u6587", "\u2019s",
)  # fmt: skip
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_WHOLE = (("Isolated", False), ("Removed", True))
"""Ways to split that keep all of the text, where the expression matches all."""


class FastBpe:
    """Encodes what both libraries encode alike; made by `fast_bpe`."""

    def __init__(
        self, definition: str, points: CodePoints, reference: tokenizers.Tokenizer, kept: Sequence[Mapping[str, Any]]
    ) -> None:
        self._definition, self._points, self._has_added = definition, points, bool(kept)
        self._overlapping = _overlapping(kept)
        self._normalizer = reference.normalizer
        self._encode, self._encoded = gigatoken_encode(definition), 0

    def encode(self, text: str) -> Ids | None:
        """Ids of `text`, int32 [tokens]; None where the reference must be asked.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        plain = text if text.isascii() else self._plain(text)
        if plain is None or any(token in plain for token in self._overlapping):
            return None
        if self._encoded > _RENEW_AFTER:
            self._encode, self._encoded = gigatoken_encode(self._definition), 0
        self._encoded += len(plain)
        return self._encode(plain).view(np.int32)

    def _plain(self, text: str) -> str | None:
        """The normalised text, or None where it has a code point that the libraries may not treat alike."""
        flags = self._points.common(text)
        if self._normalizer is not None and not flags & INERT:
            normal = self._normalizer.normalize_str(text)
            if normal != text:
                if self._has_added:  # these are looked for before and after: too many cases
                    return None
                text, flags = normal, self._points.common(normal)
        return text if flags & SAFE else None


def fast_bpe(definition: Mapping[str, Any], reference: tokenizers.Tokenizer) -> FastBpe | str:
    """The fast way for a tokenizer.json, or in words why there is none.

    `definition`: its content. `reference`: made of the same, with control tokens as text.
    """
    kept = [token for token in definition["added_tokens"] if not token["special"]]
    unfit = _unfit(definition, kept)
    if unfit is not None:
        return unfit
    bare = {**definition, "normalizer": None, "post_processor": None, "added_tokens": kept}
    try:
        points = CodePoints(definition["pre_tokenizer"], reference.normalizer, gigatoken_encode)
        made = FastBpe(json.dumps(bare | {"truncation": None, "padding": None}), points, reference, kept)
    except ImportError:
        return "the package gigatoken is not installed"
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, no Exception
            raise
        return (
            f"gigatoken does not know its kind ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        )
    differing = _differing(made, reference, [token["content"] for token in kept])
    return made if differing is None else f"gigatoken encodes {differing!r} otherwise than tokenizers does"


def gigatoken_encode(definition: str) -> Encode:
    """gigatoken's function from a text to ids, uint32 [tokens]."""
    import gigatoken

    encode: Encode = gigatoken.Tokenizer.from_json(definition).backend.encode
    return encode


def _unfit(definition: Mapping[str, Any], kept: list[dict[str, Any]]) -> str | None:
    """Why a tokenizer.json is none of those that gigatoken is known to do right; None if it is one."""
    model = definition["model"]
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        return f"its model is {model.get('type')}, not BPE"
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cases = {
        "its BPE is not of bytes": model.get("byte_fallback") or not _is_of_bytes(definition.get("pre_tokenizer")),
        "its vocabulary lacks some bytes": not alphabet <= set(model["vocab"]),
        "its BPE has dropout": model.get("dropout"),
        "its words have prefixes or suffixes": model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix"),
        "its normaliser is more than a Unicode form": not _is_unicode_form(definition.get("normalizer")),
        "added tokens take spaces or whole words": any(
            token.get("single_word") or token.get("lstrip") or token.get("rstrip") for token in kept
        ),
        "many added tokens overlap": len(_overlapping(kept)) > _OVERLAPPING_AT_MOST,
    }
    return next((why for why, holds in cases.items() if holds), None)


def _is_of_bytes(pre_tokenizer: Any) -> bool:
    """Whether it is GPT-2's byte-level one, or cuts by regular expressions before a byte-level one that does not."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if isinstance(pre_tokenizer, dict) else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return False
    cuts_itself = steps[-1].get("use_regex", True)
    whole = all(
        step.get("type") == "Split" and (step.get("behavior"), step.get("invert")) in _WHOLE for step in steps[:-1]
    )
    return whole and cuts_itself == (len(steps) == 1)


def _overlapping(kept: Sequence[Mapping[str, Any]]) -> list[str]:
    """Added tokens that overlap one of those for which the reference searches in its other search: which of the two
    it finds, gigatoken may not."""
    first = [token["content"] for token in kept if not token.get("normalized")]
    second = [token["content"] for token in kept if token.get("normalized")]
    pairs = [(one, other) for one in first for other in second if _overlap(one, other) or _overlap(other, one)]
    return sorted({token for pair in pairs for token in pair})


def _overlap(one: str, other: str) -> bool:
    return one in other or any(one.endswith(other[:size]) for size in range(1, len(other)))


def _is_unicode_form(normalizer: Any) -> bool:
    """Whether it leaves ASCII as it is."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(map(_is_unicode_form, normalizer.get("normalizers", [])))
    return normalizer.get("type") in _UNICODE_FORMS


def _differing(fast: FastBpe, reference: tokenizers.Tokenizer, added: Sequence[str]) -> str | None:
    """A text that the two encode differently, of some that are always the same."""
    draw = random.Random(0)
    parts: list[str] = [*_TRIAL_PARTS, *added[:50]]
    texts = ["", *parts, *("".join(draw.choices(parts, k=draw.randrange(2, 40))) for _ in range(_TRIALS))]
    for text in texts:
        ids = fast.encode(text)
        if ids is not None and ids.tolist() != reference.encode(text, add_special_tokens=False).ids:
            return text
    return None
