"""Items made ahead by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from data.prefetch import Prefetcher


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_come_in_order_and_end(depth: int) -> None:
    with Prefetcher(iter(range(20)), depth) as items:
        assert list(items) == list(range(20))
        assert list(items) == []


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if len(made) == 4:
                enough.set()
            yield number

    with Prefetcher(items(), depth=3) as ahead:
        next(ahead)
        assert enough.wait(10)
        time.sleep(0.05)  # room for a thread that would go on
        assert made == [0, 1, 2, 3]


def test_an_error_arrives_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ZeroDivisionError

    ahead = Prefetcher(items(), depth=5)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_ends_a_consumer_that_waits_in_another_thread() -> None:
    gate, waiting = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        waiting.set()
        gate.wait(10)
        yield 1

    ahead = Prefetcher(items(), depth=1)
    threads = [threading.Thread(target=lambda: list(ahead)), threading.Thread(target=ahead.close)]
    for thread in threads:
        assert waiting.wait(10)
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
