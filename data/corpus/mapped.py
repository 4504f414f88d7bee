"""Files that are read at a few places, or mapped to memory without a file descriptor that stays open.

Python's mmap keeps a descriptor for every map (until 3.13, where it can be told not to), so that a source of a few
thousand files would pass the usual limit of 1,024 open files. The system itself needs none.

What is looked at once is read, not touched in a map: a touched place counts as memory of the process, with up to
2 MB around it, and where the disk fails, a map ends the process where reading raises an error.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class OpenFile(AbstractContextManager["OpenFile"]):
    """A regular file while it is open. `size`: its bytes. Every method raises OSError where the disk does."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(None, "it is not a file")
        except OSError:
            os.close(self._descriptor)
            raise
        self.size = status.st_size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, start: int, size: int) -> bytes:
        """Bytes [start, start + size), fewer at the end of the file."""
        return os.pread(self._descriptor, size, start)

    def mapped(self) -> Bytes:
        """All of it, [size] uint8, read-only; unmapped with its last view. `size` must not be 0."""
        return np.asarray(_Map(self._descriptor, self.size))


@cache
def _system() -> ctypes.CDLL:
    """The C library, told what mmap and munmap take."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


class _Map:
    """Memory that a file is mapped to, until nothing refers to it; numpy makes an array of it."""

    def __init__(self, descriptor: int, size: int) -> None:
        system = _system()
        self._unmap, self._size = system.munmap, size
        self._address = system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if self._address == ctypes.c_void_p(-1).value:
            self._address = None
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"data": (self._address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._size)
