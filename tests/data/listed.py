"""Origins made of lists, for tests; a module of its own, because working processes import it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from data.texts.origin import Document, Skipped
from errors import DataRefused

Ending = Literal["whole", "damaged", "killed", "bug", "asleep"]


@dataclass(frozen=True)
class ListPart:
    """Documents in memory."""

    name: str
    items: tuple[Document | Skipped, ...]
    ending: Ending = "whole"

    @property
    def size(self) -> int:
        return sum(len(item.text.encode("utf-8", "ignore")) for item in self.items if isinstance(item, Document))

    def read(self) -> Iterator[Document | Skipped]:
        yield from self.items
        if self.ending == "damaged":
            raise DataRefused(f"{self.name} is cut short: copy it again")
        if self.ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ending == "bug":
            raise ZeroDivisionError("a bug in a reader")
        if self.ending == "asleep":
            time.sleep(60)


@dataclass(frozen=True)
class ListOrigin:
    """Parts in memory."""

    listed: tuple[ListPart, ...]

    def parts(self) -> Sequence[ListPart]:
        return self.listed

    def fingerprint(self) -> str:
        items = [item for part in self.listed for item in part.items]
        return hashlib.sha256(repr(items).encode("utf-8", "surrogatepass")).hexdigest()


def documents(texts: Sequence[str]) -> list[Document | Skipped]:
    """The texts with keys by their place."""
    return [Document(f"list:{place}", text) for place, text in enumerate(texts)]


def origin(items: Sequence[Document | Skipped], parts: int = 1, ending: Ending = "whole") -> ListOrigin:
    """The items in `parts` parts; the last one ends in `ending`."""
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    return ListOrigin(
        tuple(
            ListPart(
                f"part {part}", tuple(items[cuts[part] : cuts[part + 1]]), ending if part == parts - 1 else "whole"
            )
            for part in range(parts)
        )
    )
