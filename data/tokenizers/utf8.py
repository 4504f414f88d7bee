"""Text as UTF-8, which every tokenizer reads."""

from __future__ import annotations

from errors import DataRefused


def to_utf8(text: str) -> bytes:
    """The text's bytes. Raises DataRefused for half a character (a lone surrogate), which UTF-8 cannot hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataRefused(
            f"a text holds half a character, U+{ord(text[error.start]):04X} at place {error.start:,}, which is no "
            "Unicode text (a broken JSON escape?) and cannot be encoded: repair the text, or leave it out"
        ) from error
