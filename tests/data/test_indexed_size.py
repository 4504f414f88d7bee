"""Opening costs the same for a few documents and for a hundred million: time and memory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.corpus.indexed import HEADER, MAGIC

ROOT = Path(__file__).parents[2]
LENGTH = 500
BLOCK = 1 << 22

OPENS = """
import sys, time
from data.corpus.joined import open_corpus

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

before, counts = resident(), []
for _ in range(3):  # the machine may be busy with something else: the quickest counts
    began = time.perf_counter()
    corpus = open_corpus(sys.argv[1])
    counts.append((time.perf_counter() - began, resident() - before))
seconds, memory = min(counts)[0], counts[0][1]
corpus.check_ids(10), corpus.fingerprint()
middle = corpus.tokens // 2 + 3
print(corpus.documents, corpus.borders(middle, middle + 2048).tolist(), seconds, memory, resident() - before, sep=";")
"""


def write_documents(prefix: Path, count: int) -> Path:
    """A corpus of `count` documents of LENGTH tokens each, all of them 0; its .bin takes no room on the disk."""
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        tables = ((count, lambda at: np.full(at.size, LENGTH, "<i4")), (count, lambda at: at * LENGTH * 2),
                  (count + 1, lambda at: at))  # fmt: skip
        for entries, made in tables:
            for first in range(0, entries, BLOCK):
                file.write(made(np.arange(first, min(first + BLOCK, entries), dtype="<i8")).tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(count * LENGTH * 2)
    return prefix


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("millions", [5, pytest.param(100, marks=pytest.mark.soak)])
def test_opening_millions_of_documents_takes_milliseconds_and_little_memory(tmp_path: Path, millions: int) -> None:
    count = millions * 1_000_000
    prefix = write_documents(tmp_path / "large", count)
    try:
        files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        documents, borders, seconds, memory, memory_in_use = opened(prefix)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    middle = count // 2 * LENGTH
    assert int(documents) == count
    assert borders == str([middle + LENGTH * number for number in range(1, 5)])
    assert float(seconds) < 0.05 and float(memory) < 50 and float(memory_in_use) < 50  # MB


def opened(prefix: Path) -> list[str]:
    """Documents, borders, seconds, MB when open, MB when checked and read."""
    done = subprocess.run([sys.executable, "-c", OPENS, prefix], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(";")
