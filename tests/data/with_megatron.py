"""What megatron-core writes and reads, in a process of its own; started by test_megatron.py where it is installed.

python -m tests.data.with_megatron FOLDER: writes FOLDER/theirs_<dtype> with its builder, and tells on its last line
of standard output, as JSON, what its reader finds in FOLDER/ours_<dtype>.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
DOCUMENTS: tuple[tuple[tuple[int, ...], ...], ...] = (((1, 2, 3), (4,)), ((), (5, 6)), (), ((7,),), ((),))
"""Documents of sequences of ids: also an empty sequence, a document of none, and one of an empty one at the end."""


def write(indexed: Any, prefix: Path, dtype: str) -> None:
    """The first two documents at once, the others sequence by sequence."""
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for sequences in DOCUMENTS[:2]:
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(flat), [len(sequence) for sequence in sequences])
    for sequences in DOCUMENTS[2:]:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def read(indexed: Any, prefix: Path) -> dict[str, Any]:
    """What its reader finds."""
    found = indexed.IndexedDataset(str(prefix), mmap=True)
    sequences = [found[number].tolist() for number in range(len(found))]
    return {
        "sequences": sequences,
        "documents": found.document_indices.tolist(),
        "dtype": np.dtype(found.index.dtype).name,
    }


def main() -> None:
    """Command line."""
    # transformer-engine's Python sources without its library fail to import with another error than ImportError.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")
    folder = Path(sys.argv[1])
    for dtype in DTYPES:
        write(indexed, folder / f"theirs_{dtype}", dtype)
    print(json.dumps({dtype: read(indexed, folder / f"ours_{dtype}") for dtype in DTYPES}))


if __name__ == "__main__":
    main()
