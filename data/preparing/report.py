"""What a preparation has done, as a table and as <prefix>.report.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.corpus.indexed import HEADER
from data.corpus.metadata import CorpusMetadata, read_metadata, with_suffix
from data.preparing.lot_reader import Skips, Unreadable
from data.preparing.lots import LotRecord
from data.progress import megabytes
from errors import DataRefused
from files import write_whole

Plan = dict[str, Any]
"""Everything that the tokens depend on, as plain JSON."""

_KEYS = 3
_WORDS = {
    "encoding": "not UTF-8",
    "empty": "without text",
    "column": "column missing or no text",
    "record": "no whole record",
}


@dataclass(frozen=True)
class Side:
    """A corpus that was made."""

    documents: int
    """Documents in it."""
    tokens: int
    """Tokens in it, end-of-document tokens included."""
    bytes: int
    """UTF-8 bytes of its text."""

    @classmethod
    def of(cls, metadata: CorpusMetadata) -> Side:
        """What a corpus's .json tells of it."""
        return cls(metadata.documents, metadata.tokens, metadata.bytes_of_text)


@dataclass(frozen=True)
class Report:
    """What a preparation has done."""

    plan: Plan
    """What it was to do: everything that the tokens depend on."""
    training: Side
    """The corpus for training."""
    validation: Side | None
    """The held-out corpus; None: there is none."""
    duplicates: int
    """Documents dropped because their text was there already."""
    skipped: dict[str, Skips]
    """Texts left out, by reason."""
    unreadable: tuple[Unreadable, ...]
    """Parts that could not be read to their end."""
    seconds: float
    """Time of the start that finished it, in seconds."""
    megabytes_per_second: float
    """Text that this start read and encoded, in MB (10^6 bytes) a second."""

    def table(self) -> str:
        """The report in a few lines."""
        rows = [("training", _side(self.training))]
        if self.validation:
            rows.append(("validation", _side(self.validation)))
        if self.plan["deduplicate"]:
            rows.append(("duplicates", f"{self.duplicates:,} dropped"))
        rows += [(f"skipped, {_WORDS.get(why, why)}", _skips(skips)) for why, skips in self.skipped.items()]
        rows += [("unreadable", f"{part.why} (after {part.documents:,} documents)") for part in self.unreadable]
        rows.append(("time", f"{self.seconds:.1f} s, {self.megabytes_per_second:.1f} MB of text/s"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def skips_in_words(skipped: dict[str, Skips]) -> str:
    """Why texts were left out, in a sentence's part."""
    return "; ".join(f"{_WORDS.get(why, why)}: {_skips(skips)}" for why, skips in skipped.items())


def all_skips(records: Sequence[LotRecord]) -> dict[str, Skips]:
    """The lots' skips together, by reason."""
    reasons = sorted({why for record in records for why in record.skipped})
    return {why: _together(record.skipped[why] for record in records if why in record.skipped) for why in reasons}


def write_report(prefix: Path, report: Report) -> None:
    """Writes the report beside the corpus at `prefix`."""
    write_whole(with_suffix(prefix, ".report.json"), json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def read_report(prefix: Path) -> Report | None:
    """The report beside the corpus at `prefix`; None: there is none, or it is none of ours."""
    try:
        fields = json.loads(with_suffix(prefix, ".report.json").read_text(encoding="utf-8"))
        fields["training"] = Side(**fields["training"])
        fields["validation"] = Side(**fields["validation"]) if fields["validation"] else None
        fields["skipped"] = {
            why: Skips(skips["count"], tuple(skips["keys"])) for why, skips in fields["skipped"].items()
        }
        fields["unreadable"] = tuple(Unreadable(**unreadable) for unreadable in fields["unreadable"])
        fields |= {"seconds": float(fields["seconds"]), "megabytes_per_second": float(fields["megabytes_per_second"])}
        return Report(**fields) if isinstance(fields["plan"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_there(prefix: Path, side: Side) -> bool:
    """Whether the corpus at `prefix` is whole and the one that `side` tells of, by its counts and sizes."""
    try:
        metadata = read_metadata(prefix)
        if metadata is None or Side.of(metadata) != side:
            return False
        width = {"uint16": 2, "int32": 4}[metadata.dtype]
        sizes = {".bin": width * side.tokens, ".idx": HEADER.size + 20 * side.documents + 8}
        return all(with_suffix(prefix, part).stat().st_size == size for part, size in sizes.items())
    except (OSError, KeyError, DataRefused):
        return False


def differences(plan: Plan, other: Plan) -> str:
    """Where `other` differs from `plan`, in words."""
    keys = [key for key in sorted(plan | other) if plan.get(key) != other.get(key)]
    return ", ".join(f"{key} {_short(other.get(key))} instead of {_short(plan.get(key))}" for key in keys)


def _short(value: object) -> str:
    words = "none" if value is None else str(value)
    return words if len(words) <= 20 else f"{words[:12]}..."


def _side(side: Side) -> str:
    return (
        f"{side.documents:,} documents, {side.tokens:,} tokens, {megabytes(side.bytes)} of text, "
        f"{side.bytes / side.tokens:.2f} bytes a token"
    )


def _skips(skips: Skips) -> str:
    keys = ", ".join(key.encode("utf-8", "backslashreplace").decode() for key in skips.keys)
    return f"{skips.count:,} ({keys}{', ...' if skips.count > len(skips.keys) else ''})"


def _together(all_of_them: Iterable[Skips]) -> Skips:
    count, keys = 0, list[str]()
    for skips in all_of_them:
        count += skips.count
        keys += skips.keys[: _KEYS - len(keys)]
    return Skips(count, tuple(keys))
