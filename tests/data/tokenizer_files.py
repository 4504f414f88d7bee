"""Small tokenizer.json files for tests, of the kinds that models are published with."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data.texts.documents import documents_of
from data.texts.stdlib import library

END = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MORE = [
    "l'été, l'œuvre", "Grüße, Straße", "中文字符和文本。", "русский текст", "한국어 텍스트", "हिन्दी पाठ", "עברית",
    "=\U00010940=\U00010940",  # a letter since Unicode 17: its cuts show in the ids
] * 20  # fmt: skip
KINDS = ("gpt2", "llama3", "qwen2", "o200k")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that cuts by a regular expression."""
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(kind: str) -> str:
    """Content of a tokenizer.json with some 1,200 entries, trained on a part of the standard library."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    patterns = {"llama3": LLAMA3, "qwen2": QWEN2, "o200k": O200K}
    tokenizer.pre_tokenizer = split(patterns[kind]) if kind in patterns else pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    texts = [document.text for document in islice(documents_of(library()), 12)] + MORE
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def added(content: str, special: bool = False, normalized: bool = False, **more: Any) -> dict[str, Any]:
    """An entry of added_tokens; its id is filled in by `changed`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"content": content} | flags | more


def changed(definition: str, tokens: list[dict[str, Any]] | None = None, **changes: Any) -> str:
    """The content with other parts, and with more added tokens, whose ids follow the vocabulary's."""
    parts = json.loads(definition) | changes
    first = len(parts["model"]["vocab"])
    parts["added_tokens"] += [token | {"id": first + number} for number, token in enumerate(tokens or [])]
    return json.dumps(parts)


def written(folder: Path, definition: str, name: str = "tokenizer.json") -> Path:
    """The path of a file with the content."""
    (folder / name).write_text(definition, encoding="utf-8")
    return folder / name


def reference(definition: str) -> Tokenizer:
    """The library itself, told to take control tokens' names as text."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    return tokenizer
