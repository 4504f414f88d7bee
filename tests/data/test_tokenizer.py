"""The tokenizer keeps every character of its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import Tokenizer, train_sentencepiece
from errors import DataRefused

TEXTS = [
    f"class Name{n}:\n    def method(self, value={n}):\n\tif value:\n            return self.other('é', value)\n\n"
    for n in range(200)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_sentencepiece(TEXTS, 340, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


characters = st.characters(exclude_categories=["Cs"])
awkward = st.sampled_from(
    [
        "    ",
        "\t",
        "\r\n",
        "\n\n",
        "  ",
        "\u2581",
        "</s>",
        "<unk>",
        "<0x0A>",
        "\0",
        "self.",
        "\ufeff",
        "e\u0301",
        "\U0001f525",
        "\u2028",
    ]
)
code_text = st.lists(st.text(characters) | awkward).map("".join)


@settings(deadline=None, max_examples=300)
@given(code_text)
def test_any_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eod not in ids


def test_indentation_is_a_token_and_frequent_words_are_few(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("            return self.other")) < 8


def test_the_end_of_a_document_gives_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a"


def test_training_twice_gives_the_same_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    again = train_sentencepiece(iter(TEXTS), 340, tmp_path / "again.model")
    assert again.path.read_bytes() == tokenizer.path.read_bytes()
    assert again.fingerprint == tokenizer.fingerprint


def test_a_loaded_tokenizer_is_the_trained_one(tokenizer: Tokenizer) -> None:
    loaded = Tokenizer(str(tokenizer.path))
    assert loaded.vocab_size == 340
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(DataRefused, match=f"tokenizer of {vocab_size} entries cannot.*data.vocab_size"):
        train_sentencepiece(TEXTS, vocab_size, tmp_path / "tokenizer.model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"none.model cannot be read.*data.tokenizer"):
        Tokenizer(tmp_path / "none.model")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" * 500])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(DataRefused, match=r"bad.model"):
        Tokenizer(tmp_path / "bad.model")
