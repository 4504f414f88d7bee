"""A tokenizer is found by its content and keeps every character of its text: sentencepiece and bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from errors import DataRefused

TEXTS = [
    f"class Name{n}:\n    def method(self, value={n}):\n\tif value:\n            return self.other('é', value)\n\n"
    for n in range(200)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
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
def test_any_text_comes_back_unchanged(tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eod not in ids


def test_indentation_is_a_token_and_frequent_words_are_few(tokenizer: SentencePieceTokenizer) -> None:
    assert len(tokenizer.encode("            return self.other")) < 8


def test_the_end_of_a_document_gives_no_text(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a"


def test_training_twice_gives_the_same_file(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    again = train_sentencepiece(iter(TEXTS), 340, tmp_path / "again.model")
    assert again.path.read_bytes() == tokenizer.path.read_bytes()
    assert again.fingerprint == tokenizer.fingerprint


def test_a_loaded_tokenizer_is_the_trained_one(tokenizer: SentencePieceTokenizer) -> None:
    loaded = load_tokenizer(str(tokenizer.path))
    assert isinstance(loaded, SentencePieceTokenizer)
    assert loaded.vocab_size == 340
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize("vocab_size", [100, 100_000])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(DataRefused, match=f"tokenizer of {vocab_size} entries cannot.*data.vocab_size"):
        train_sentencepiece(TEXTS, vocab_size, tmp_path / "tokenizer.model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"none.model cannot be read.*data.tokenizer"):
        load_tokenizer(tmp_path / "none.model")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" * 500])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(DataRefused, match=r"bad.model"):
        load_tokenizer(tmp_path / "bad.model")


def test_a_batch_has_the_ids_of_each_text(tokenizer: SentencePieceTokenizer) -> None:
    texts = [*TEXTS[:3], "", "\u2581", "a\u2581\u2581b", "self.other"]
    batch = tokenizer.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in texts]
    assert {ids.dtype for ids in batch} == {np.dtype(np.int32)}
    assert tokenizer.encode_batch([]) == []


def test_sentencepiece_itself_gives_the_same_ids(tokenizer: SentencePieceTokenizer) -> None:
    itself = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == itself.encode(TEXTS)


@given(st.text(characters, max_size=50))
def test_bytes_are_tokens_and_257_in_all(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) == tokenizer.encode_batch([text])[0].tolist()
    assert tokenizer.decode([*ids, tokenizer.eod]) == text
    assert (tokenizer.eod, tokenizer.vocab_size, str(tokenizer.path)) == (256, 257, "bytes")
    assert len(tokenizer.fingerprint) == 64


def test_half_a_character_is_refused_by_every_kind(tokenizer: SentencePieceTokenizer) -> None:
    for each in (tokenizer, load_tokenizer("bytes")):
        with pytest.raises(DataRefused, match=r"half a character, U\+D83D at place 1.*leave it out"):
            each.encode_batch(["good", "a\ud83db"])


def test_a_folder_stands_for_the_file_in_it(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"holds no tokenizer.json and no tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.path.read_bytes())
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_a_model_without_an_end_of_document_is_refused_when_asked_for_it(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "m"), vocab_size=60, eos_id=-1, minloglevel=2
    )
    with pytest.raises(DataRefused, match=r"m.model has no end-of-sequence token"):
        _ = load_tokenizer(tmp_path / "m.model").eod


def test_a_folder_that_is_not_there_leaves_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"cannot be written \(No such file.*choose a folder"):
        train_sentencepiece(TEXTS, 340, tmp_path / "none" / "tokenizer.model")
