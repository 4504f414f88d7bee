"""Which tokens sample n is made of: arithmetic alone, so that a run resumes anywhere from one number.

stream of tokens   |--o--|-- chunk 0 --|-- chunk 1 --| ... |-- chunk K-1 --|-+-- left out --|
                                                                             (one more target)
sample n           epoch n // K, chunk permutation(n % K); o and the permutation change every epoch
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from errors import DataRefused

Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_WORD = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MIXER = 0xD6E8FEB86659FD93


class Permutation:
    """A bijection of [0, size) chosen by `key` (any 64-bit number), computed without a table.

    A Feistel network on the smallest power of two that holds `size`: each round changes one half of the bits
    by a hash of the other half, which is undone by doing it again, so the network is a bijection. A result
    outside [0, size) goes through the network again until it is inside ("cycle walking": at most twice on
    average). Sizes from 1 to 2^62; ValueError otherwise.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"a permutation of {size} elements: the size must be from 1 to 2^62")
        self.size = size
        bits = (size - 1).bit_length()
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits // 2)) - 1
        digest = hashlib.blake2b(struct.pack("<QQ", key & _WORD, size), digest_size=8 * _ROUNDS).digest()
        keys = struct.unpack(f"<{_ROUNDS}Q", digest)
        self._rounds = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __call__(self, index: int) -> int:
        """Where `index` goes; IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside [0, {self.size})")
        value = self._network(index)
        while value >= self.size:
            value = self._network(value)
        return value

    def map(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each of `indices` (any shape, int64) goes: same shape, int64. IndexError outside [0,
        size)."""
        if indices.size and (indices.min() < 0 or indices.max() >= self.size):
            raise IndexError(f"{indices.min()} to {indices.max()} are not all inside [0, {self.size})")
        values = self._network_of_array(indices.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._network_of_array(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(indices.shape)

    def _network(self, value: int) -> int:
        high, low = value >> self._low_bits, value & self._low_mask
        for key_high, key_low in self._rounds:
            hashed = (low + key_high) * _MULTIPLIER & _WORD
            high ^= ((hashed ^ hashed >> 32) * _MIXER & _WORD) >> 32 & self._high_mask
            hashed = (high + key_low) * _MULTIPLIER & _WORD
            low ^= ((hashed ^ hashed >> 32) * _MIXER & _WORD) >> 32 & self._low_mask
        return high << self._low_bits | low

    def _network_of_array(self, values: Words) -> Words:
        high, low = values >> np.uint64(self._low_bits), values & np.uint64(self._low_mask)
        for key_high, key_low in self._rounds:
            high ^= _hash_array(low, key_high) & np.uint64(self._high_mask)
            low ^= _hash_array(high, key_low) & np.uint64(self._low_mask)
        joined: Words = high << np.uint64(self._low_bits) | low
        return joined


def _hash_array(values: Words, key: int) -> Words:
    hashed = (values + np.uint64(key)) * np.uint64(_MULTIPLIER)
    mixed: Words = (hashed ^ hashed >> np.uint64(32)) * np.uint64(_MIXER) >> np.uint64(32)
    return mixed


class SampleOrder:
    """Maps a global sample number, counted from 0 over all epochs, to its place in a stream of tokens.

    `tokens`: length N of the stream. `seq_len`: length S of a sample, in tokens; a sample reads S + 1, the
    last one only as a target. `source`: name of the source, part of the key. `shuffle=False`: chunks in
    natural order from the first token, the same every epoch. Every epoch has `samples_per_epoch` samples,
    which do not overlap. Raises DataRefused when the stream is shorter than one sample.
    """

    def __init__(self, tokens: int, seq_len: int, seed: int, source: str, shuffle: bool = True) -> None:
        if tokens < seq_len + 1:
            raise DataRefused(
                f"source {source!r} has {tokens} tokens, but one sample of "
                f"train.seq_len={seq_len} needs {seq_len + 1} (the last one as a target): set "
                f"train.seq_len to at most {tokens - 1}, or give more data"
            )
        self.tokens, self.seq_len = tokens, seq_len
        # Shuffled chunks begin up to seq_len - 1 tokens late, which takes room for one of them.
        room = tokens - seq_len if shuffle else tokens - 1
        self.samples_per_epoch = max(1, room // seq_len)
        self._key = f"{seed} {source}"
        self._shuffle = shuffle
        self._epoch = self._make_epoch(0)

    @property
    def uncovered(self) -> int:
        """Tokens that an epoch neither reads nor predicts: fewer than two samples."""
        return self.tokens - (self.samples_per_epoch * self.seq_len + 1)

    @property
    def report(self) -> str:
        """A sentence on what an epoch covers."""
        place = "a different place each epoch" if self._shuffle else "the end of the stream"
        share = self.uncovered / self.tokens
        return (
            f"{self.samples_per_epoch:,} samples of {self.seq_len:,} tokens an epoch, "
            f"{self.uncovered:,} tokens ({share:.2%}) left over at {place}"
        )

    def start(self, sample: int) -> int:
        """First token of a global sample; it reads [start, start + S + 1)."""
        number, place = divmod(sample, self.samples_per_epoch)
        epoch, permutation, offset = self._epoch
        if epoch != number:
            # Replaced whole, so that a second thread never sees half of it.
            self._epoch = epoch, permutation, offset = self._make_epoch(number)
        chunk = permutation(place) if permutation else place
        return chunk * self.seq_len + offset

    def starts(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`start` of many samples at once, [n] -> [n]; some 20 times as fast a sample."""
        numbers, places = np.divmod(samples, self.samples_per_epoch)
        starts = np.empty_like(places)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            self._epoch = epoch = self._epoch if self._epoch[0] == number else self._make_epoch(number)
            _, permutation, offset = epoch
            chunks = permutation.map(places[own]) if permutation else places[own]
            starts[own] = chunks * self.seq_len + offset
        return starts

    def _make_epoch(self, number: int) -> tuple[int, Permutation | None, int]:
        if not self._shuffle:
            return number, None, 0
        digest = hashlib.blake2b(f"{self._key} {number}".encode(), digest_size=16).digest()
        key, drawn = struct.unpack("<QQ", digest)
        room = min(self.seq_len - 1, self.tokens - 1 - self.samples_per_epoch * self.seq_len)
        return number, Permutation(self.samples_per_epoch, key), drawn % (room + 1)
