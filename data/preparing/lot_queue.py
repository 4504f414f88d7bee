"""The order in which lots are done, and when enough are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from data.preparing.lot_reader import Lot
from data.preparing.lots import LotRecord


class LotQueue:
    """Which lots are done, which are needed, and how much text there may be."""

    def __init__(self, lots: Sequence[Lot], limit: int | None) -> None:
        self.lots, self.bytes = list(lots), 0
        self._limit = limit
        self._records: dict[int, LotRecord] = {}
        self._next = self._documents = self._bytes_done = self._size_done = 0
        self._cut: int | None = None
        self._size = sum(lot.size for lot in self.lots) if all(lot.size for lot in self.lots) else None

    def jobs(self) -> Iterator[Lot]:
        """Lots to do, until the limit is reached by lots that are done; big ones first where there is no limit."""
        order = self.lots if self._limit else sorted(self.lots, key=lambda lot: -lot.size)
        for lot in order:
            if self._limit and (self._documents >= self._limit or self._is_beyond(lot)):
                return
            if lot.number not in self._records:
                yield lot

    def _is_beyond(self, lot: Lot) -> bool:
        return self._cut is not None and lot.number > self._cut

    def add(self, lot: Lot, record: LotRecord) -> None:
        """Counts a lot that is done; one that goes over the limit is to be done again, up to the limit."""
        self._records[lot.number] = record
        self._bytes_done += record.bytes
        self._size_done += lot.size
        while self._limit and (reached := self._records.get(self._next)) and self._documents < self._limit:
            left = self._limit - self._documents
            if reached.documents > left:
                self.lots[self._next] = replace(self.lots[self._next], limit=left)
                del self._records[self._next]
                self._cut = self._next
                return
            self._documents += reached.documents
            self._next += 1

    def needed(self) -> list[LotRecord]:
        """The records in order, those beyond the limit left out."""
        return [self._records[number] for number in range(self._next if self._limit else len(self.lots))]

    def total(self) -> int | None:
        """Bytes of text that there will be, as far as sizes on disk tell; None: unknown."""
        if self._limit or self._size is None:
            return None
        ratio = self._bytes_done / self._size_done if self._size_done else 1.0
        total = self._bytes_done + ratio * (self._size - self._size_done)
        return round(total) if total >= self.bytes else None
