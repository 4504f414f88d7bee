"""Which token of a tokenizer.json ends a document: the file itself does not say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import DataRefused

_CONFIG = "tokenizer_config.json"
_USUAL = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|end\u2581of\u2581sentence|>",
    "[EOS]",
    "<|eos|>",
    "<EOS>",
    "<EOT>",
    "<|eod|>",
    "<eod>",
)
_SHOWN = 10


@dataclass(frozen=True)
class EndOfDocument:
    """The end of a document, or why there is none."""

    token: str | None
    """What the token is called; None: it cannot be told."""
    refusal: str = ""
    """What to tell whoever needs it, then."""


def end_of_document(path: Path, definition: dict[str, Any]) -> EndOfDocument:
    """The `eos_token` of the tokenizer_config.json beside `path`, else the first usual name that the tokenizer has.

    `definition`: content of the tokenizer.json. Raises DataRefused for a damaged tokenizer_config.json, a name that
    the tokenizer does not have, and added tokens that are none.
    """
    added = _added_names(path, definition)
    known = set(added) | _vocabulary(definition)
    named = _configured(path.parent / _CONFIG)
    if named is not None and named not in known:
        raise DataRefused(
            f"{path.parent / _CONFIG} names {named!r} as eos_token, but {path} has no such token: give the two files "
            "of one tokenizer, or correct eos_token"
        )
    token = named or next((name for name in _USUAL if name in known), None)
    return EndOfDocument(token, _refusal(path, added) if token is None else "")


def _added_names(path: Path, definition: dict[str, Any]) -> list[str]:
    try:
        return [str(token["content"]) for token in definition["added_tokens"] if token["special"] in (True, False)]
    except (TypeError, KeyError) as error:
        raise DataRefused(
            f"the tokenizer {path} is damaged: an entry of added_tokens lacks its content or whether it is special; "
            "copy the file again"
        ) from error


def _vocabulary(definition: dict[str, Any]) -> set[str]:
    """Names in the model's vocabulary: a mapping, or pairs of name and score."""
    entries = definition["model"].get("vocab")
    if isinstance(entries, dict):
        return set(entries)
    pairs = entries if isinstance(entries, list) else []
    return {str(pair[0]) for pair in pairs if isinstance(pair, list) and pair}


def _configured(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json; None where there is no such file or no such key."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        token = content.get("eos_token")
        return None if token is None else str(token["content"] if isinstance(token, dict) else token)
    except RecursionError as error:
        raise DataRefused(f"{config} is no tokenizer's configuration ({error}): copy it again") from error
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataRefused(f"{config} cannot be read ({error.strerror}): make it readable, or take it away") from error
    except (ValueError, AttributeError, KeyError) as error:
        raise DataRefused(
            f"{config} is damaged, its eos_token cannot be read: copy it again, or take it away"
        ) from error


def _refusal(path: Path, added: list[str]) -> str:
    shown = ", ".join(added[:_SHOWN]) + (f" and {len(added) - _SHOWN} more" if len(added) > _SHOWN else "")
    return (
        f"which token of {path} ends a document cannot be told: it has none with a usual name "
        f"({', '.join(_USUAL[:4])}, ...) and there is no {_CONFIG} with an eos_token beside it; write one there, "
        'such as {"eos_token": "NAME"}, with one of its added tokens: '
        f"{shown or 'it has none, so give another tokenizer'}"
    )
