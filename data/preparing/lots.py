"""Lots: the portions that a preparation is done in; each becomes pieces and a record, or is done again.

parts of the origin    | a | b | c |   d   | e | f |  ...
lots                   |     0     |   1   |   2   |  ...
work folder            lot_00000000.0000.piece ... lot_00000000.json   (the record is written last)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.corpus.writer import disk_refusals, token_dtype
from data.preparing.lot_reader import Batch, Batches, Lot, Settings, Skips, Unreadable
from data.preparing.pieces import ROW, Piece, PieceWriter, Rows, Tokens, is_whole
from data.preparing.shuffle import place_digest, ranks, sides, words
from data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from errors import DataRefused
from files import write_whole

Tell = Callable[[int], None]
"""Is told how many further bytes of text are done."""


@dataclass(frozen=True)
class LotRecord:
    """What became of a lot."""

    lot: int
    """Its number."""
    limit: int | None
    """Its limit when it was read."""
    cut: str
    """Which parts it was, as Lot.cut."""
    documents: int
    """Documents read, those left out for their size included."""
    bytes: int
    """Bytes of their text."""
    duplicates: int
    """Documents left out because the same piece held their text already."""
    lowest_side: int | None
    """The lowest side among those kept; None: there are none."""
    skipped: dict[str, Skips]
    """Texts left out, by reason."""
    unreadable: tuple[Unreadable, ...]
    """Parts that failed."""
    pieces: tuple[Piece, ...]
    """Where the documents are."""


@dataclass(frozen=True)
class LotSetup:
    """What a working process needs to do lots; can be pickled. Calling it makes the process ready."""

    folder: Path
    """The work folder."""
    tokenizer: str
    """Path that the tokenizer is loaded from."""
    fingerprint: str
    """The one that it must have."""
    settings: Settings
    """What is kept."""

    def __call__(self) -> LotWorker:
        tokenizer = load_tokenizer(self.tokenizer, _say_nothing)
        if tokenizer.fingerprint != self.fingerprint:
            raise DataRefused(f"{self.tokenizer} was replaced by another tokenizer meanwhile: start again")
        return LotWorker(self.folder, tokenizer, self.settings)


class LotWorker:
    """Does lots: reads, encodes, writes pieces and the record."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
        self._folder, self._tokenizer, self._settings = folder, tokenizer, settings
        self._eod, self._vocab = tokenizer.eod, tokenizer.vocab_size
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")

    def __call__(self, lot: Lot, tell: Tell) -> tuple[LotRecord, bool]:
        """The lot's record, and whether it was there already, with whole pieces, and is not done again.

        Raises DataRefused when the disk is full or cannot be written.
        """
        with disk_refusals(self._folder):
            record = read_record(self._folder, lot)
            if record is not None:
                tell(record.bytes)
                return record, True
            record = self._done(lot, tell)
            write_whole(self._folder / _record_name(lot.number), json.dumps(dataclasses.asdict(record)))
            return record, False

    def _done(self, lot: Lot, tell: Tell) -> LotRecord:
        writer = PieceWriter(self._folder, _name(lot.number), self._dtype, self._settings.deduplicate)
        batches = Batches(lot, self._settings)
        lowest: int | None = None
        for batch in batches:
            if batch.documents:
                rows, tokens = self._encoded(batch)
                lowest = min(int(rows["side"].min()), 1 << 64 if lowest is None else lowest)
                writer.add(rows, tokens)
            tell(batch.read)
        pieces = writer.finish()
        skipped = {why: Skips(count, tuple(keys)) for why, (count, keys) in sorted(batches.skipped.items())}
        return LotRecord(
            lot.number, lot.limit, lot.cut, batches.documents, batches.bytes, writer.duplicates, lowest,
            skipped, tuple(batches.unreadable), pieces,
        )  # fmt: skip

    def _encoded(self, batch: Batch) -> tuple[Rows, Tokens]:
        """A batch's rows [n] and its tokens, one document after the other, each with its end."""
        encoded = self._tokenizer.encode_batch([document.text for document in batch.documents])
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) + 1
        pieces = [np.array([self._eod], encoded[0].dtype)] * (2 * len(encoded))
        pieces[::2] = encoded
        tokens = np.concatenate(pieces)
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise DataRefused(
                f"{self._tokenizer.path} gave ids from {tokens.min()} to {tokens.max()}, but has {self._vocab} "
                "entries: its files do not belong together; copy it again"
            )
        return self._rows(batch, lengths), tokens.astype(self._dtype)

    def _rows(self, batch: Batch, lengths: npt.NDArray[np.int64]) -> Rows:
        contents = places = words(batch.digests)
        if not self._settings.deduplicate:
            keys = (document.key for document in batch.documents)
            places = words(map(place_digest, batch.digests, keys))
        rows = np.empty(len(batch.documents), ROW)
        rows["rank"], rows["tie"] = ranks(places[:, 0], self._settings.seed), places[:, 1]
        rows["side"], rows["tokens"], rows["bytes"] = sides(contents[:, 0]), lengths, batch.sizes
        return rows


def read_record(folder: Path, lot: Lot) -> LotRecord | None:
    """The record of a lot that is done, or None where it is to be done (again): no record, one of another limit or
    of a part that could not be read, a damaged one, or pieces that are not as they were written."""
    try:
        fields = json.loads((folder / _record_name(lot.number)).read_text(encoding="utf-8"))
        fields["skipped"] = {
            why: Skips(skips["count"], tuple(skips["keys"])) for why, skips in fields["skipped"].items()
        }
        fields["unreadable"] = tuple(Unreadable(**unreadable) for unreadable in fields["unreadable"])
        fields["pieces"] = tuple(Piece(**piece) for piece in fields["pieces"])
        record = LotRecord(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    fits = (record.lot, record.limit, record.cut) == (lot.number, lot.limit, lot.cut) and not record.unreadable
    return record if fits and all(is_whole(folder, piece) for piece in record.pieces) else None


def _name(number: int) -> str:
    return f"lot_{number:08d}"


def _record_name(number: int) -> str:
    return f"{_name(number)}.json"


def _say_nothing(line: str) -> None:
    """What is to be said of the tokenizer is said once, by the parent."""
