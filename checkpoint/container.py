"""Files of tensors that one can check: safetensors, with a hash of every block of every tensor.

    | header length (8) | header (JSON) | tensor 0 | tensor 1 | ...        no gaps, nothing behind
                                         block 0, block 1, ...            a hash each, of xxh3 (128 bits)

A file's own hash is that of its parts' hashes: the header's, then all blocks' in their order. So it is made as the file
is written, and whoever reads a part can check that part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

BLOCK = 16 << 20
"""Bytes of a tensor that have a hash of their own."""
_HASH_BYTES = 16
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Corrupt(ValueError):
    """A file's bytes are not those that were written."""


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in its file."""

    offset: int
    """Of its first byte."""
    hashes: tuple[str, ...]
    """Of its blocks, in hex."""


@dataclass(frozen=True)
class Written:
    """What a file of tensors holds."""

    size: int
    """Bytes of the file."""
    header: str
    """Hash of what precedes the tensors, in hex."""
    header_size: int
    """Bytes of it."""
    places: Mapping[str, Placed]
    """Its tensors, in their order."""

    @property
    def hash(self) -> str:
        """Of the whole file."""
        return combined([self.header, *(each for place in self.places.values() for each in place.hashes)])


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3 of 128 bits, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def combined(hashes: Sequence[str]) -> str:
    """The hash of hashes."""
    return digest("".join(hashes).encode())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each block of a tensor of so many bytes."""
    return ((begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK))


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write tensors, contiguous and on the CPU, to a new file and force it to the disk.

    Raises:
        OSError: the system refuses.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # so that all align
    header = _header(ordered)
    places, offset = {}, len(header)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(handle, memoryview(header))
        for name, tensor in ordered.items():
            memory = as_bytes(tensor)
            hashes = []
            for begin, end in blocks(len(memory)):
                _write_all(handle, memory[begin:end])
                hashes.append(digest(memory[begin:end]))
            places[name] = Placed(offset, tuple(hashes))
            offset += len(memory)
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(offset, digest(header), len(header), places)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """What precedes the tensors' bytes, padded to 8."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(handle: int, memory: memoryview) -> None:
    while memory:
        memory = memory[os.write(handle, memory) :]


@contextmanager
def opened(path: Path, size: int) -> Iterator[int]:
    """A handle to read a file that must have so many bytes.

    Raises:
        Corrupt: it has more, or fewer.
        OSError: it is not there.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(handle).st_size
        if found != size:
            raise Corrupt(f"it has {found} bytes instead of {size}")
        yield handle
    finally:
        os.close(handle)


def check_header(handle: int, header_size: int, hashed: str) -> None:
    """Raises: Corrupt, if what precedes the tensors is not what was written."""
    if digest(read(handle, 0, header_size)) != hashed:
        raise Corrupt("its header's hash is not the one that was written")


def read(handle: int, offset: int, size: int) -> bytearray:
    """So many bytes.

    Raises:
        Corrupt: the file ends before.
    """
    memory = bytearray(size)
    read_into(handle, offset, memoryview(memory))
    return memory


def read_into(handle: int, offset: int, memory: memoryview) -> None:
    """Fill memory from a place in the file.

    Raises:
        Corrupt: the file ends before.
    """
    done = 0
    while done < len(memory):
        count = os.preadv(handle, [memory[done:]], offset + done)
        if not count:
            raise Corrupt(f"it ends at byte {offset + done}")
        done += count


def read_checked(handle: int, place: Placed, name: str, memory: memoryview, first_block: int = 0) -> None:
    """Fill memory with whole blocks of a tensor, from one of its blocks on, and check each.

    Raises:
        Corrupt: a block's hash is another.
    """
    for begin, end in blocks(len(memory)):
        number = first_block + begin // BLOCK
        part = memory[begin:end]
        read_into(handle, place.offset + number * BLOCK, part)
        if digest(part) != place.hashes[number]:
            raise Corrupt(f"the bytes of {name} from {place.offset + number * BLOCK} on have another hash than written")
