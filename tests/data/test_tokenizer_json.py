"""A tokenizer.json is read as pretraining needs it: no control token can be spelled, nothing is added or cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data.tokenizers.json_tokenizer import JsonTokenizer
from data.tokenizers.tokenizer import load_tokenizer
from errors import DataRefused
from tests.data.tokenizer_files import END, added, changed, reference, trained, written

Load = Callable[..., JsonTokenizer]


@pytest.fixture(scope="module")
def definition() -> str:
    return trained("llama3")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a definition (and a tokenizer_config.json) and loads it."""

    def loaded(definition: str, config: Any = None) -> JsonTokenizer:
        if config is not None:
            written(tmp_path, config if isinstance(config, str) else json.dumps(config), "tokenizer_config.json")
        tokenizer = load_tokenizer(written(tmp_path, definition))
        assert isinstance(tokenizer, JsonTokenizer)
        return tokenizer

    return loaded


def test_what_it_is_follows_from_the_content(definition: str, tmp_path: Path) -> None:
    file = written(tmp_path, definition)
    copy = written(tmp_path, definition, "tokenizer.model")
    found = [load_tokenizer(path) for path in (file, str(file), tmp_path, copy)]
    assert {each.fingerprint for each in found} == {found[0].fingerprint}
    assert {type(each) for each in found} == {JsonTokenizer}
    assert (found[0].path, found[3].path) == (file, copy)


@pytest.mark.parametrize("control", [True, False])
def test_a_text_cannot_spell_the_end_of_a_document(definition: str, load: Load, control: bool) -> None:
    parts = json.loads(definition)
    parts["added_tokens"][0]["special"] = control
    tokenizer = load(json.dumps(parts))
    text = f"a page about {END} tokens: {END}{END} and\u00e9 {END}"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod == tokenizer._reference.token_to_id(END)
    assert tokenizer.eod not in ids
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text
    assert ids.tolist() == reference(definition).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("normalized", [False, True])
def test_no_control_token_can_be_spelled(definition: str, load: Load, normalized: bool) -> None:
    tokens = [added("<|pad|>", special=True, normalized=normalized), added("<|user|>", special=True, rstrip=True)]
    tokenizer = load(changed(definition, tokens))
    ids = tokenizer.encode("<|pad|> and <|user|>  text")
    assert not {tokenizer._reference.token_to_id(each) for each in ("<|pad|>", "<|user|>")} & set(ids)
    assert tokenizer.decode(ids) == "<|pad|> and <|user|>  text"


def test_nothing_is_added_cut_or_padded(definition: str, load: Load) -> None:
    other = Tokenizer.from_str(definition)
    end = other.token_to_id(END)
    other.post_processor = processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, end)])
    other.enable_truncation(4)
    other.enable_padding(length=50, pad_token=END, pad_id=end)
    text = "self.value = 12345 and more"
    found = load(other.to_str()).encode_batch([text, "", "x"])
    right = reference(definition)
    assert [ids.tolist() for ids in found] == [right.encode(each).ids for each in (text, "", "x")]
    assert len(found[1]) == 0


def test_every_id_is_below_the_vocabulary_s_size(definition: str, load: Load) -> None:
    parts = json.loads(changed(definition, [added("<a>"), added("<b>", special=True)]))
    tokenizer = load(json.dumps(parts))
    assert tokenizer.vocab_size == len(parts["model"]["vocab"]) + 2
    assert tokenizer.vocab_size > max(tokenizer.encode("<a> <b> text"))


@pytest.mark.parametrize("named", ["<|stop|>", {"content": "<|stop|>", "lstrip": False}])
def test_the_config_beside_it_names_the_end(definition: str, load: Load, named: Any) -> None:
    tokenizer = load(changed(definition, [added("<|stop|>", special=False)]), {"eos_token": named})
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.eod not in tokenizer.encode("a <|stop|> sign")


def test_else_a_usual_name_is_the_end(definition: str, load: Load) -> None:
    tokens = [added("<|begin_of_text|>", special=True), added("</s>", special=True), added("<|eot_id|>", special=True)]
    tokenizer = load(changed(definition.replace(END, "<|nothing|>"), tokens), {"eos_token": None})
    assert tokenizer.eod == tokenizer._reference.token_to_id("</s>")


def test_without_one_the_end_is_refused_and_the_candidates_listed(definition: str, load: Load) -> None:
    tokenizer = load(changed(definition.replace(END, "<|nothing|>"), [added("<|finish|>", special=True)]))
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"
    with pytest.raises(DataRefused, match=r"ends a document cannot be told.*eos_token.*<\|nothing\|>, <\|finish\|>"):
        _ = tokenizer.eod


@pytest.mark.parametrize(
    ("config", "words"),
    [({"eos_token": "</s>"}, "names '</s>' as eos_token, but"), ("{", "is damaged"), ("[]", "is damaged"),
     ({"eos_token": {"id": 2}}, "is damaged"), ("\udcff".encode("utf-8", "surrogateescape"), "is damaged")],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(definition: str, tmp_path: Path, config: Any, words: str) -> None:
    content = (
        config if isinstance(config, bytes) else (config if isinstance(config, str) else json.dumps(config)).encode()
    )
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataRefused, match=words):
        load_tokenizer(written(tmp_path, definition))


def test_an_end_that_a_text_still_gives_is_refused(load: Load) -> None:
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load(words.to_str())
    assert tokenizer.encode("a b") == [1, 2]
    with pytest.raises(DataRefused, match=r"end of a document, id 0, inside of a text that begins with 'a </s>'"):
        tokenizer.encode("a </s>")


def test_other_models_than_bpe_are_left_to_the_reference(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -1.5)], unk_id=0)
    )
    tokenizer = load(pieces.to_str())
    assert "slow tokenizer" in capsys.readouterr().err
    assert (tokenizer.encode("abab"), tokenizer.eod, tokenizer.vocab_size) == ([4, 4], 1, 5)


@pytest.mark.parametrize("text", ["a\ud83db", "caf\u00e9 \udc00"])
def test_half_a_character_is_refused(definition: str, load: Load, text: str) -> None:
    with pytest.raises(DataRefused, match="half a character"):
        load(definition).encode_batch(["good", text])


DAMAGED = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "no object": lambda whole: "[1, 2]",
    "no tokenizer": lambda whole: '{"vocab_size": 5}',
    "no vocabulary": lambda whole: json.dumps(json.loads(whole) | {"model": {"type": "BPE"}}),
    "unknown model": lambda whole: json.dumps(json.loads(whole) | {"model": {"type": "Nonsense", "vocab": {}}}),
    "odd added tokens": lambda whole: json.dumps(json.loads(whole) | {"added_tokens": [{"id": 3}]}),
    "added tokens no list": lambda whole: json.dumps(json.loads(whole) | {"added_tokens": 3}),
    "odd vocabulary": lambda whole: json.dumps(json.loads(whole) | {"model": {"type": "BPE", "vocab": [[], 3]}}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(definition: str, tmp_path: Path, damage: str) -> None:
    with pytest.raises(DataRefused, match=r"tokenizer\.json"):
        load_tokenizer(written(tmp_path, DAMAGED[damage](definition)))


def test_a_tokenizer_that_cuts_by_chance_is_refused(definition: str, load: Load) -> None:
    model = json.loads(definition)["model"] | {"dropout": 0.5}
    with pytest.raises(DataRefused, match=r"model.dropout=0.5.*by chance"):
        load(changed(definition, model=model))


def test_json_without_end_is_refused(load: Load, definition: str) -> None:
    with pytest.raises(DataRefused, match="damaged"):
        load('{"model": ' + "[" * 200_000)
    with pytest.raises(DataRefused, match=r"tokenizer_config.json"):
        load(definition, "[" * 200_000).eod  # noqa: B018


def test_a_word_without_an_id_is_refused(load: Load) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, END: 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert load(tokenizer.to_str()).encode("a a") == [0, 0]
    with pytest.raises(DataRefused, match="has no ids for a text that begins with 'a b'"):
        load(tokenizer.to_str()).encode("a b")
