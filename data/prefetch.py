"""Makes the next items in a background thread while the current one is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    error: BaseException | None


class Prefetcher(Generic[T]):
    """Iterates over `items`, at most `depth` of them made ahead; depth 0: no thread, made when asked for.

    An exception raised while an item is made is raised, as it is, by the `next` that would have returned the
    item. `close` (or leaving the context) ends the thread after the item it is at; then iteration is over.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._closed = threading.Event()
        self._slots = threading.Semaphore(depth)
        self._made: SimpleQueue[T | _End] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        if self._thread is None:
            return next(self._items)
        item = self._made.get()
        if not isinstance(item, _End):
            self._slots.release()
            return item
        self.close()
        raise item.error or StopIteration

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and waits for it; more than once is allowed."""
        self._closed.set()
        if self._thread:
            self._slots.release()  # wakes a thread that waits for room
            self._made.put(_End(None))  # wakes a consumer in another thread
            self._thread.join()

    def _run(self) -> None:
        error = None
        try:
            while self._slots.acquire() and not self._closed.is_set():
                self._made.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as caught:  # raised again where the item is asked for
            error = caught
        self._made.put(_End(error))
