"""Where a document stands in a shuffled corpus, and on which side of the split: hashes of the document alone.

A document's rank is a keyed hash, and a prepared corpus is its documents sorted by rank. The order therefore
depends on the documents and the seed, and on nothing about how they were read: not on the cut into files, not
on the number of processes, not on the order of the readers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_DIGEST_BYTES = 16
_SIDE_KEY = np.uint64(0x5851F42D4C957F2D)


def content_digest(content: bytes) -> bytes:
    """16 bytes that stand for a text: two texts have the same ones only when they are the same."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def place_digest(digest: bytes, key: str) -> bytes:
    """16 bytes that stand for a text (by its `digest`) at a place (by its `key`): copies of a text differ."""
    name = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, key=digest, digest_size=_DIGEST_BYTES).digest()


def words(digests: Iterable[bytes]) -> Words:
    """Digests as numbers: [digests, 2] uint64."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).astype(np.uint64)


def ranks(first: Words, seed: int) -> Words:
    """Places in the order of `seed`, from digests' first words [n]: [n] uint64, evenly spread, a bijection."""
    key = hashlib.blake2b(f"shuffle {seed}".encode(), digest_size=8).digest()
    return _mixed(first ^ np.uint64(int.from_bytes(key, "little")))


def sides(first: Words) -> Words:
    """What decides training or held-out, from content digests' first words [n]: [n] uint64, evenly spread."""
    return _mixed(first ^ _SIDE_KEY)


def held_out_limit(share: float, lowest: int) -> int:
    """The highest side that is held out: a `share` of all, and at least the `lowest` side that there is."""
    return max(int(share * 2**64) - 1, lowest)


def _mixed(values: Words) -> Words:
    """A bijection of 64-bit words in which every bit of the input moves every bit of the output (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
