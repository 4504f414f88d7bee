"""Saving while training goes on: a copy of the state is taken, and a thread writes it.

    training    copy | steps ...                      | copy | steps ...
    thread           | write, hash, read back, commit |      | write ...

Training waits for the copy alone, which goes into memory that is taken once and warm. (Without a thread it waits for
all but the removal of old checkpoints.) The thread talks to those of other processes in a group of its own, so that its
messages and training's do not meet.
"""

from __future__ import annotations

import errno
import math
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoint import store, tensors
from checkpoint.folder import Folders, step_name
from checkpoint.pieces import Contents, Piece, is_written
from checkpoint.run_state import RunState
from checkpoint.store import Retention, Writer
from errors import CheckpointRefused
from parallel.process import Everyone

_LOCAL = Retention(2)  # the fast folder is small: what is kept for long is kept in the main one
_PATIENCE = 3600  # seconds that one process's writing may take longer than another's
_ALIGNED = 64


@dataclass(frozen=True)
class Outcome:
    """How a save ended."""

    step: int
    """Whose state it is."""
    path: Path
    """The checkpoint, in the run's own folder."""
    seconds: float
    """From the beginning until it was whole."""
    held: float
    """Of these, what training waited for."""
    error: CheckpointRefused | None = None
    """Why there is none."""
    note: str = ""
    """What else is to be told."""


class Saver:
    """Saves one state after another; every process calls the same methods in the same order."""

    def __init__(
        self, folders: Folders, everyone: Everyone, retention: Retention, background: bool,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:  # fmt: skip
        """pieces: like those that will be saved; the memory for their copy is taken now, not at the first save."""
        self.folders, self.retention, self.background = folders, retention, background
        self.everyone = everyone.apart(_PATIENCE) if background else everyone
        self._memory = torch.empty(0, dtype=torch.uint8)
        if background and pieces is not None:
            self._make_room(pieces)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="removal")
        self._removals: list[Future[None]] = []
        self._thread: threading.Thread | None = None
        self._ended: Outcome | BaseException | None = None

    def save(
        self, pieces: Mapping[str, Piece], state: RunState, *, files: Mapping[str, bytes],
        keep_all: bool = False, fails: bool = False,
    ) -> None:  # fmt: skip
        """Begin a save; the one before must have ended (`wait`).

        Args:
            pieces: what this process holds, by global name.
            state: rank 0's is written.
            files: contents of further ones, by name.
            keep_all: whether older checkpoints stay, whatever the retention says.
            fails: whether this process finds the disk full, for a drill.
        """
        began = time.perf_counter()
        self.wait_for_removals()
        retention = Retention() if keep_all else self.retention
        writer: Writer = _find_no_room if fails else tensors.write

        def write(own: Mapping[str, Piece], held: float) -> Outcome:
            path, note = self.folders.main / step_name(state.step), ""
            error: CheckpointRefused | None = None
            try:
                note = self._write(own, state, files, retention, writer)
            except CheckpointRefused as refusal:
                error = refusal
            return Outcome(state.step, path, time.perf_counter() - began, held, error, note)

        if not self.background:
            outcome = write(pieces, 0.0)
            self._ended = replace(outcome, held=outcome.seconds)
            return
        copy = self._copy(pieces)
        copied = torch.cuda.Event() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        if copied is not None:
            copied.record()

        def run(held: float) -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                self._ended = write(copy, held)
            except BaseException as error:  # training raises it
                self._ended = error

        self._thread = threading.Thread(
            target=run, args=(time.perf_counter() - began,), name="checkpoint", daemon=True
        )  # fmt: skip
        self._thread.start()

    def outcome(self) -> Outcome | None:
        """How the save ended, told once; None: it goes on, or there was none. Waits for nothing.

        Raises:
            Exception: what ended it, if that was no refusal.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        return self._take()

    def wait(self) -> Outcome | None:
        """As `outcome`, once the save has ended."""
        if self._thread is not None:
            self._thread.join()
        return self._take()

    def close(self) -> None:
        """Give a save that nobody waited for a moment: others may be gone, and it would wait for them."""
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        self._remover.shutdown()

    def _remove(self, path: Path) -> None:
        """Remove what a save left over while training goes on; in the saving thread that is so already."""
        if self.background:
            shutil.rmtree(path)
        else:
            self._removals.append(self._remover.submit(shutil.rmtree, path))

    def wait_for_removals(self) -> None:
        """Wait for what is being removed: a new save removes what it finds left."""
        removals, self._removals = self._removals, []
        wait(removals)

    def _take(self) -> Outcome | None:
        ended, self._ended, self._thread = self._ended, None, None
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _write(
        self, pieces: Mapping[str, Piece], state: RunState, files: Mapping[str, bytes], retention: Retention,
        writer: Writer,
    ) -> str:  # fmt: skip
        """Write a checkpoint, by way of the fast folder if there is one; what is to be told of it."""
        main, local = self.folders.main, self.folders.local
        note = ""

        def save(folder: Path, keep: Retention) -> Path:
            return store.save(
                folder, pieces, state, keep=keep, files=files, everyone=self.everyone,
                read_back=self.background, writer=writer, remove=self._remove,
            )  # fmt: skip

        if local is not None:
            try:
                store.transfer(save(local, _LOCAL), main, keep=retention, everyone=self.everyone)
                return note
            except CheckpointRefused as refusal:
                note = f"not by way of checkpoint.local: {refusal}"
        save(main, retention)
        return note

    def _copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces, those that this process writes in memory of their own. On CUDA the copies are enqueued behind
        what is at work, and before what comes."""
        self._make_room(pieces)
        copies = dict(pieces)
        for name, piece, begin, end in _places(pieces):
            local = self._memory[begin:end].view(piece.local.dtype).view(piece.local.shape)
            local.copy_(piece.local, non_blocking=True)
            copies[name] = replace(piece, local=local)
        return copies

    def _make_room(self, pieces: Mapping[str, Piece]) -> None:
        """Take memory for the copy, and touch it: the first touch of a page costs more than a copy into it."""
        needed = max((end for *_, end in _places(pieces)), default=0)
        if needed > len(self._memory):
            on_cuda = any(piece.local.is_cuda for piece in pieces.values())
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=on_cuda).zero_()


def _places(pieces: Mapping[str, Piece]) -> Iterator[tuple[str, Piece, int, int]]:
    """The pieces that this process writes, each with its first byte in the memory and the one behind its last."""
    begin = 0
    for name, piece in pieces.items():
        if is_written(piece):
            end = begin + piece.local.numel() * piece.local.element_size()
            yield name, piece, begin, end
            begin = math.ceil(end / _ALIGNED) * _ALIGNED


def _find_no_room(folder: Path, file: str, pieces: Mapping[str, Piece]) -> Contents:
    raise OSError(errno.ENOSPC, "No space left on device (debug.inject)", str(folder / file))
