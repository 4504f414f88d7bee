"""The fast way of byte-level BPE gives the reference's ids for every text there is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data.tokenizers import fast_bpe
from data.tokenizers.code_points import INERT, SAFE, CodePoints
from data.tokenizers.fast_bpe import gigatoken_encode
from data.tokenizers.json_tokenizer import JsonTokenizer
from errors import DataRefused
from tests.data.tokenizer_files import END, KINDS, added, changed, reference, trained

Both = tuple[JsonTokenizer, Tokenizer]
NEW_LETTERS = [chr(point) for point in (*range(0x10940, 0x1095A), *range(0x11DB0, 0x11DF0), 0xC5C, 0xA7CF, 0xA7D2)]
"""Unicode 17's, which one of the two libraries may know and the other not."""
AWKWARD = [
    *" \t\n\r\0\x0b\x0c\x1c\x7f\x85'", "  ", "    ", "\r\n", "\n\n", "'s", "'LL", "'\u017f", "\u2019s", "n't", "the",
    " self", "CamelCase", "1", "23", "456", "7890", "==", "#!", "</s>", END, "<|", "|>", "\u00a0", "\u00e9", "e\u0301",
    "\u0301", "\u0323", "\u00df", "\u212a", "\u0130", "\u4e2d\u6587", "\u1100\u1161\u11a8", "\ud55c", "\u05d0",
    "\u0627", "\u0663", "\u0939\u093f", "\u09c7\u09be", "\u00bd", "\u2167", "\u2028", "\u3000", "\u200b", "\u200d",
    "\u2060", "\ufeff", "\ufffd", "\U0001f600", "\U0001f468\u200d\U0001f469", "\U00020000", "\U00016d67\U00016d67",
    "\ue000", "\U0010ffff", *NEW_LETTERS[:2],
]  # fmt: skip
characters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.sampled_from(AWKWARD) | st.sampled_from(AWKWARD) | st.text(characters, max_size=6)).map("".join)


def silent(line: str) -> None:
    """Hears nothing."""


def made(definition: str, say: Callable[[str], None] = silent) -> Both:
    """Our tokenizer and the library's."""
    return JsonTokenizer(Path("x/tokenizer.json"), definition.encode(), say), reference(definition)


def same(both: Both, text: str) -> bool:
    """Whether both give the same ids for a text."""
    ours, theirs = both
    return ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def definitions() -> dict[str, str]:
    return {kind: trained(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def tokenizers(definitions: dict[str, str]) -> dict[str, Both]:
    return {kind: made(definition) for kind, definition in definitions.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_reference_s_ids(tokenizers: dict[str, Both], kind: str) -> None:
    ours, theirs = tokenizers[kind]
    assert ours.fast

    @settings(deadline=None, max_examples=150)
    @given(texts)
    def check(text: str) -> None:
        right = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == right
        # What the fast way takes is right by itself, not because an audit looked on.
        found = ours._fast.encode(text) if ours._fast else None
        assert found is None or found.tolist() == right

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_letters_that_one_of_the_libraries_does_not_know_have_the_reference_s_ids(
    tokenizers: dict[str, Both], kind: str
) -> None:
    for letter in NEW_LETTERS:
        assert same(tokenizers[kind], f"a{letter}b {letter}{letter} 1{letter}'s{letter}")


def test_letters_that_the_libraries_cut_differently_do_not_go_the_fast_way(definitions: dict[str, str]) -> None:
    definition = definitions["gpt2"]
    ours, theirs = made(definition)
    bare = gigatoken_encode(changed(definition, added_tokens=[]))
    differing = [
        text
        for letter in NEW_LETTERS
        if bare(text := f"={letter}=").tolist() != theirs.encode(text, add_special_tokens=False).ids
    ]
    if not differing:
        pytest.skip("the installed versions know the same Unicode")
    assert ours._fast is not None
    assert [ours._fast.encode(text) for text in differing] == [None] * len(differing)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_very_long_words_have_the_reference_s_ids(tokenizers: dict[str, Both], kind: str) -> None:
    for word in ("a", " ", "\n", "self", "12345", "=-", "\u4e2d", "\0", "a\r\n", "e\u0301"):
        assert same(tokenizers[kind], word * (20_000 // len(word)))


def test_ordinary_texts_of_many_languages_go_the_fast_way(tokenizers: dict[str, Both]) -> None:
    ours, _ = tokenizers["qwen2"]
    assert ours._fast is not None
    for text in (
        "l'\u00e9t\u00e9",
        "\u4e2d\u6587\u5b57\u7b26",
        "\u0440\u0443\u0441\u0441\u043a\u0438\u0439",
        "\U0001f600!",
    ):
        assert ours._fast.encode(text) is not None


@pytest.mark.parametrize("normalized", [False, True])
def test_added_tokens_that_are_text_are_found_as_the_reference_finds_them(
    definitions: dict[str, str], normalized: bool
) -> None:
    tokens = [added(content, normalized=normalized) for content in ("<think>", "<th", "  qq", " @  ", "@@@@")]
    both = [made(changed(definitions[kind], tokens)) for kind in ("gpt2", "qwen2")]
    assert all(ours.fast for ours, _ in both)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.sampled_from(["<think>", "<th", "ink>", " @ ", "@", "  q", "q", "a", "\n", "\u0338", "\u00e9"])))
    def check(parts: list[str]) -> None:
        assert all(same(each, "".join(parts)) for each in both)

    check()


def test_added_tokens_that_overlap_are_left_to_the_reference(definitions: dict[str, str]) -> None:
    both = made(changed(definitions["gpt2"], [added("<xyz"), added("xyz>", normalized=True), added("<@>")]))
    assert both[0]._fast is not None
    assert same(both, "a <xyz> b") and both[0]._fast.encode("a <xyz> b") is None
    assert same(both, "a <@> b") and both[0]._fast.encode("a <@> b") is not None


def test_a_difference_on_the_way_is_refused(
    definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ours, _ = made(definitions["gpt2"])
    assert ours._fast is not None
    monkeypatch.setattr(ours._fast, "encode", lambda text: np.array([1, 2, 3], np.int32))
    with pytest.raises(DataRefused, match=r"other ids.*begins with 'self.x'.*TATARA_TOKENIZER=reference.*anew"):
        ours.encode_batch(["self.x"])


def test_the_audit_goes_on_after_the_first_texts(definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = made(definitions["gpt2"])
    assert ours._fast is not None
    ours.encode_batch(["some words " * 7000])  # longer than the part of a text that is compared
    ours.encode_batch(["word " * 1000] * 20)
    monkeypatch.setattr(ours._fast, "encode", lambda text: np.array([1, 2, 3], np.int32))
    with pytest.raises(DataRefused, match="other ids"):
        ours.encode_batch([f"text {number}" for number in range(5000)])


def test_a_kind_that_gigatoken_reads_otherwise_is_found_out_and_slow(definitions: dict[str, str]) -> None:
    # A token with an id of its own in added_tokens, though the vocabulary has it already: which id is right?
    said: list[str] = []
    both = made(changed(definitions["gpt2"], [added("self")]), said.append)
    assert not both[0].fast and len(said) == 1
    assert "slow tokenizer" in said[0] and "'self' otherwise" in said[0]
    assert same(both, "self is self")


SLOW: dict[str, tuple[dict[str, Any], str]] = {
    "prefix space": ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "bytes"),
    "no cuts": ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                                   "trim_offsets": True}}, "bytes"),
    "no pre-tokenizer": ({"pre_tokenizer": None}, "bytes"),
    "lower case": ({"normalizer": {"type": "Lowercase"}}, "normaliser"),
    "unknown expression": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": r"\w+|\s+|[^\w\s]+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}]}}, "does not know"),
    "greedy token": ({"tokens": [added("<mask>", lstrip=True)]}, "take spaces"),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW)
def test_other_kinds_are_slow_and_said_once_to_be(definitions: dict[str, str], case: str) -> None:
    changes, word = SLOW[case]
    said: list[str] = []
    both = made(changed(definitions["gpt2"], **changes), said.append)
    assert not both[0].fast and len(said) == 1 and word in said[0]
    assert same(both, "Self is 12345  <mask> times\n")


def test_without_gigatoken_all_is_slow_and_right(definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    said: list[str] = []
    both = made(definitions["gpt2"], said.append)
    assert not both[0].fast and "gigatoken is not installed" in said[0]
    assert same(both, "self is text")


def test_the_reference_alone_can_be_asked_for(definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TATARA_TOKENIZER", "reference")
    said: list[str] = []
    both = made(definitions["gpt2"], said.append)
    assert not both[0].fast and "TATARA_TOKENIZER=reference" in said[0]
    assert same(both, "self is text")


def test_gigatoken_s_memory_is_given_back_and_the_ids_stay(
    definitions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = made(definitions["gpt2"])
    fast = both[0]._fast
    assert fast is not None
    before = fast._encode
    monkeypatch.setattr(fast_bpe, "_RENEW_AFTER", 0)
    assert same(both, "self is text") and same(both, "self is text again")
    assert fast._encode is not before


def test_code_points_are_told_apart() -> None:
    definition = trained("qwen2")
    reads = json.loads(definition)["pre_tokenizer"]
    points = CodePoints(reads, reference(definition).normalizer, gigatoken_encode)
    assert points.common("plain text") & (SAFE | INERT) == SAFE | INERT
    assert points.common("\u00e9\u4e2d\U0001f600") & (SAFE | INERT) == SAFE | INERT
    for joining in ("\u0301", "\u1161", "\u11a8", "\u09be", "\U00016d67", "\u212b"):
        assert not points.common(f"a{joining}") & INERT
    with pytest.raises(UnicodeEncodeError):
        points.common("\ud83d")
