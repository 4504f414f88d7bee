"""Texts become a corpus: read, encoded, shuffled, split, deduplicated; killed at any moment, it goes on.

    origin -> lots -> workers -> sorted pieces in <output>.work/ -> merge -> <output>.bin .idx .json .report.json

A document's place follows from the document and the seed alone, so the files are the same to the last byte for
any number of workers and any number of interruptions.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.corpus.metadata import with_suffix
from data.corpus.writer import CorpusWriter, disk_refusals, remove_leftovers, token_dtype
from data.lock import exclusive
from data.preparing.lot_queue import LotQueue
from data.preparing.lot_reader import Settings, lots_of
from data.preparing.lots import LotRecord, LotSetup
from data.preparing.merge import Side as MergedSide
from data.preparing.merge import Sides, merge
from data.preparing.report import (
    Plan,
    Report,
    Side,
    all_skips,
    differences,
    is_there,
    read_report,
    skips_in_words,
    write_report,
)
from data.preparing.shuffle import held_out_limit
from data.preparing.work_folder import WorkFolder
from data.preparing.workers import shared_out
from data.progress import Meter, Say
from data.texts.origin import Origin
from data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from errors import ConfigRefused, DataRefused
from files import sync

_VERSION = 1
"""Raised whenever the same documents and settings would give other tokens, or other pieces."""
_ENDINGS = (".bin", ".idx", ".json")


@dataclass(frozen=True)
class Preparation:
    """What is made of what."""

    origin: Origin
    """Where the texts are."""
    tokenizer: str
    """Path of the tokenizer, as load_tokenizer takes it."""
    output: Path
    """Prefix of the corpus for training."""
    validation: Path | None = None
    """Prefix of the held-out corpus; None: nothing is held out."""
    held_out: float = 0.01
    """Share of the documents that is held out, from 0 (exclusive) to 1; at least one document is."""
    seed: int = 0
    """Of the document shuffle."""
    workers: int = 1
    """Processes that read and encode, at least 1."""
    deduplicate: bool = False
    """Whether of equal texts only the first is kept."""
    min_bytes: int = 0
    """Shortest text that is kept, in bytes of UTF-8."""
    max_bytes: int | None = None
    """Longest text that is kept, in bytes of UTF-8; None: any."""
    max_documents: int | None = None
    """Documents read, the first ones of the origin; None: all."""
    allow_unreadable: bool = False
    """Whether parts that cannot be read are left out (and reported) instead of refused."""
    overwrite: bool = False
    """Whether another corpus of that name, or another's unfinished work, is replaced."""

    def __post_init__(self) -> None:
        """Raises ConfigRefused for values that cannot work."""
        apart = self.validation is None or self.validation.resolve() != self.output.resolve()
        named = all(
            not path.name.endswith((".bin", ".idx")) and path.name not in ("", "..") for path in self._prefixes()
        )
        rules = (
            ("held_out", self.held_out, 0 < self.held_out < 1, "above 0 and below 1 (leave out validation for none)"),
            ("output or validation", " ".join(map(str, self._prefixes())), named, "a path that ends in a name, without "
             ".bin and .idx"),
            ("workers", self.workers, self.workers >= 1, "at least 1"),
            ("min_bytes", self.min_bytes, self.min_bytes >= 0, "at least 0"),
            ("max_bytes", self.max_bytes, self.max_bytes is None or self.max_bytes >= max(1, self.min_bytes),
             "at least 1 and not below min_bytes"),
            ("max_documents", self.max_documents, self.max_documents is None or self.max_documents >= 1, "at least 1"),
            ("validation", self.validation, apart, "another prefix than the output's"),
        )  # fmt: skip
        for name, value, holds, rule in rules:
            if not holds:
                raise ConfigRefused(f"{name} is {value}, but must be {rule}: change it")

    def _prefixes(self) -> list[Path]:
        """Of what is made."""
        return [self.output] if self.validation is None else [self.output, self.validation]


def prepare(preparation: Preparation, say: Say, note: Say | None = None) -> Report:
    """Makes the corpora, or goes on making them, or finds them made.

    Any number of processes may call it at once: one a file system works, the others wait for it and get the same
    report. A process that is killed, however it is killed, leaves nothing half-made under the final names, and
    the next start goes on from what was done. `say`: prints a line. `note`: is told about once a second how far
    it is.

    Raises:
        DataRefused: texts, tokenizer or disk cannot be used, or another corpus is in the way; the words say which.
    """
    with disk_refusals(preparation.output.parent):
        for prefix in filter(None, (preparation.output, preparation.validation)):
            prefix.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # In one order, so that two that share a held-out corpus do not wait for each other.
            prefixes = sorted(filter(None, (preparation.output, preparation.validation)))
            tells = [
                stack.enter_context(exclusive(_beside(prefix, ".{}.lock"), f"preparing {prefix}", say))
                for prefix in prefixes
            ]
            tell_waiting = None if None in tells else _all(*tells)
            told = _all(note, tell_waiting)
            work = _beside(preparation.output, "{}.work")
            if tell_waiting is None:
                work = work.with_name(f"{work.name}.{uuid.uuid4().hex[:12]}")
                say(f"without locks, a preparation that is stopped begins anew; {work} is then left behind")
            return _Task(preparation, work, say, told, alone=tell_waiting is not None).run()


def is_prepared(preparation: Preparation) -> bool:
    """Whether the corpora are there already; writes nothing, and takes no lock, so that a disk may be read-only."""
    nobody = _all()
    return _Task(preparation, _beside(preparation.output, "{}.work"), nobody, nobody).finished() is not None


class _Task:
    """One preparation, under its lock."""

    def __init__(self, preparation: Preparation, work: Path, say: Say, note: Say, alone: bool = True) -> None:
        """alone: no other process works at the same corpora; else what it has made so far must be left to it."""
        self._preparation, self._say, self._note, self._alone = preparation, say, note, alone
        self._tokenizer = load_tokenizer(preparation.tokenizer, say)
        self._plan = _plan(preparation, self._tokenizer)
        self._work = WorkFolder(work, self._plan)
        self._began = time.monotonic()
        self._bytes_found = 0

    def run(self) -> Report:
        """The report of the finished corpora."""
        self._work.clean()
        report = self.finished()
        if report is not None:
            self._say(f"{self._preparation.output} is done already: the same texts, tokenizer and settings")
        else:
            if not self._work.take_over(self._preparation.overwrite, self._say):
                self._refuse_existing()
                self._work.make()
            for prefix in filter(None, (self._preparation.output, self._preparation.validation)):
                if self._alone:
                    remove_leftovers(prefix)
            try:
                records = self._read()
            except DataRefused:
                self._work.remove_if_empty()  # the command as it is mended must not meet it
                raise
            self._check(records)
            report = self._merged(records)
        if self._work.is_ours():
            self._work.remove()
        return report

    def finished(self) -> Report | None:
        """The report of a corpus that is there already and is the one asked for."""
        asked, report = self._preparation, read_report(self._preparation.output)
        if report is None or report.plan != self._plan or not is_there(asked.output, report.training):
            return None
        if report.validation and not (asked.validation and is_there(asked.validation, report.validation)):
            return None
        if report.unreadable and not asked.allow_unreadable:
            return None
        return report

    def _refuse_existing(self) -> None:
        """Raises DataRefused where another corpus has one of the names."""
        asked = self._preparation
        if asked.overwrite:
            return
        for prefix in filter(None, (asked.output, asked.validation)):
            found = [path for path in (with_suffix(prefix, ending) for ending in _ENDINGS) if path.exists()]
            if found:
                report = read_report(asked.output)
                why = differences(report.plan, self._plan) if report else "it has no report of a preparation"
                if report and report.plan == self._plan:
                    why = "its files are not those of its report, or some of its texts were unreadable"
                raise DataRefused(
                    f"{found[0]} is there already, and is not what is asked for ({why}): pass --overwrite to replace "
                    "it, or choose another output"
                )

    def _read(self) -> list[LotRecord]:
        """The records of all lots that are needed, in order; pass one."""
        asked = self._preparation
        settings = Settings(asked.seed, asked.deduplicate, asked.min_bytes, asked.max_bytes)
        queue = LotQueue(lots_of(asked.origin.parts(), asked.max_documents), asked.max_documents)
        setup = LotSetup(self._work.path, asked.tokenizer, self._tokenizer.fingerprint, settings)
        many = "portions" if len(queue.lots) != 1 else "portion"
        workers = "processes" if asked.workers != 1 else "process"
        self._say(f"{asked.output}: {len(queue.lots):,} {many} of text, {asked.workers} {workers}")
        with Meter("encoding", self._say, self._note) as meter:

            def tell(count: int) -> None:
                queue.bytes += count
                meter.update(queue.bytes, queue.total(), self._bytes_found)

            for _ in range(2):  # the second time for a lot that max_documents cuts
                with closing(shared_out(setup, queue.jobs(), asked.workers, tell, self._work.alive)) as results:
                    for lot, (record, found) in results:
                        self._bytes_found += record.bytes if found else 0
                        queue.add(lot, record)
                        for part in record.unreadable:
                            self._say(f"warning: {part.part} cannot be read: {part.why}")
        return queue.needed()

    def _check(self, records: Sequence[LotRecord]) -> None:
        """Raises DataRefused unless there is something to merge, and all of it."""
        asked = self._preparation
        unreadable = [part for record in records for part in record.unreadable]
        kept = sum(piece.documents for record in records for piece in record.pieces)
        if unreadable and (not asked.allow_unreadable or not kept):
            first = "\n".join(f"  {part.why}" for part in unreadable[:5])
            rest = f"\n  and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
            way = "mend or remove them" + (", or go on without them: data.prepare --allow-unreadable" if kept else "")
            raise DataRefused(f"{len(unreadable)} parts of the texts cannot be read: {way}\n{first}{rest}")
        if not kept:
            self._work.remove()  # there is nothing in it that another command could go on with
            why = skips_in_words(all_skips(records)) or "nothing was found"
            raise DataRefused(f"there is no text to prepare ({why}): check what is read, its format and its column")
        if asked.origin.fingerprint() != self._plan["texts"]:
            raise DataRefused(
                "the texts were changed while they were read, so the corpus would be neither the old nor the new: "
                "start again when they are still"
            )

    def _merged(self, records: Sequence[LotRecord]) -> Report:
        """Writes the corpora and the report; pass two."""
        asked, dtype = self._preparation, token_dtype(self._tokenizer.vocab_size)
        lowest = min(record.lowest_side for record in records if record.lowest_side is not None)
        pieces = [piece for record in records for piece in record.pieces]
        total, done = sum(record.bytes for record in records), 0
        with ExitStack() as stack:
            training = MergedSide(stack.enter_context(CorpusWriter(asked.output, dtype)))
            validation = (
                MergedSide(stack.enter_context(CorpusWriter(asked.validation, dtype))) if asked.validation else None
            )
            sides = Sides(training, validation, held_out_limit(asked.held_out, lowest))
            meter = stack.enter_context(Meter("shuffling", self._say, self._note))

            def tell(count: int) -> None:
                nonlocal done
                done += count
                meter.update(done, max(total, done))

            order = np.dtype(dtype).newbyteorder("<")
            duplicates = merge(self._work.path, pieces, order, sides, asked.deduplicate, tell)
            made = self._moved(records, sides)
        # Last of all: with a report the corpus is done, and nobody looks for what writers may have left.
        report = self._report(records, made, duplicates + sum(record.duplicates for record in records))
        write_report(asked.output, report)
        return report

    def _moved(self, records: Sequence[LotRecord], sides: Sides) -> tuple[Side, Side | None]:
        """Moves training and validation into place."""
        asked, tokenizer = self._preparation, self._tokenizer
        if sides.training.writer.documents == 0:
            raise DataRefused(
                f"held_out={asked.held_out} leaves none of {sum(record.documents for record in records)} documents for "
                "training: lower it, or hold nothing out"
            )
        if self._alone:  # what stands there goes first: an old corpus beside a new held-out one would overlap
            for ending in (".report.json", ".json", ".idx"):
                with_suffix(asked.output, ending).unlink(missing_ok=True)
            sync(asked.output.absolute().parent)

        def made(side: MergedSide) -> Side:
            return Side.of(side.writer.finish(tokenizer.fingerprint, tokenizer.vocab_size, side.bytes_of_text))

        validation = made(sides.validation) if sides.validation else None
        return made(sides.training), validation

    def _report(self, records: Sequence[LotRecord], made: tuple[Side, Side | None], duplicates: int) -> Report:
        seconds = time.monotonic() - self._began
        rate = (sum(record.bytes for record in records) - self._bytes_found) / 1e6 / seconds
        return Report(
            plan=self._plan,
            training=made[0],
            validation=made[1],
            duplicates=duplicates,
            skipped=all_skips(records),
            unreadable=tuple(part for record in records for part in record.unreadable),
            seconds=round(seconds, 3),
            megabytes_per_second=round(rate, 3),
        )


def _plan(preparation: Preparation, tokenizer: Tokenizer) -> Plan:
    """Everything that the files depend on; the number of workers is not among it."""
    return {
        "version": _VERSION,
        "texts": preparation.origin.fingerprint(),
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "held_out": preparation.held_out if preparation.validation else None,
        "seed": preparation.seed,
        "deduplicate": preparation.deduplicate,
        "min_bytes": preparation.min_bytes,
        "max_bytes": preparation.max_bytes,
        "max_documents": preparation.max_documents,
        "validation": _relative(preparation),
    }


def _relative(preparation: Preparation) -> str | None:
    """The held-out corpus as seen from the other, so that both may be moved together."""
    held = preparation.validation
    return None if held is None else os.path.relpath(held.resolve(), preparation.output.resolve().parent)


def _all(*listeners: Say | None) -> Say:
    """Tells all that are there."""

    def tell(state: str) -> None:
        for listener in filter(None, listeners):
            listener(state)

    return tell


def _beside(path: Path, name: str) -> Path:
    return path.with_name(name.format(path.name))
