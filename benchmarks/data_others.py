"""What others need to give the samples of a corpus, for `python -m benchmarks.data`; each where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.corpus.indexed import IndexedCorpus

SEQ_LEN = 2048
VOCAB = 32_000

Read = Callable[[int, int], None]
"""Makes samples [first, first + count)."""


def others(corpus: IndexedCorpus, folder: Path, total: int) -> Iterator[tuple[str, Read]]:
    """Name and reader of each; a line for what is not installed."""
    known = {
        "Megatron GPTDataset": ("megatron", megatron),
        "litdata": ("litdata", litdata),
        "MosaicML streaming": ("streaming", streaming),
    }
    for name, (module, make) in known.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name}: not installed, left out")
            continue
        yield name, make(corpus, folder, total)


def megatron(corpus: IndexedCorpus, folder: Path, total: int) -> Read:
    """GPTDataset as Megatron's pretraining uses it, without an attention mask."""
    # transformer-engine's Python sources without its library fail to import with another error than ImportError.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    gpt: Any = importlib.import_module("megatron.core.datasets.gpt_dataset")
    indexed: Any = importlib.import_module("megatron.core.datasets.indexed_dataset")
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    tokenizer = SimpleNamespace(vocab_size=VOCAB, eod=0, pad=-1, unique_identifiers={})
    config = gpt.GPTDatasetConfig(
        random_seed=0, sequence_length=SEQ_LEN, blend=([str(corpus.prefix)], None), split="1,0,0",
        path_to_cache=str(folder / "megatron"), tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    source = indexed.IndexedDataset(str(corpus.prefix), mmap=True)
    indices = np.arange(corpus.documents, dtype=np.int32)
    made = gpt.GPTDataset(source, str(corpus.prefix), indices, total, utils.Split.train, config)

    def read(first: int, count: int) -> None:
        for number in range(first, first + count):
            made[number]

    return read


def litdata(corpus: IndexedCorpus, folder: Path, total: int) -> Read:
    """Blocks of a StreamingDataset with its TokensLoader, on local disk, read at random."""
    lit: Any = importlib.import_module("litdata")
    loader: Any = importlib.import_module("litdata.streaming.item_loader")
    writer: Any = importlib.import_module("litdata.streaming.writer")
    target = folder / "litdata"
    target.mkdir()
    block = SEQ_LEN + 1
    cache = writer.BinaryWriter(str(target), chunk_size=block * 4096, item_loader=loader.TokensLoader(block))
    for number in range(total):
        cache[number] = torch.from_numpy(corpus.read(number * SEQ_LEN, number * SEQ_LEN + block).astype(np.int32))
    cache.done()
    cache.merge()
    made = lit.StreamingDataset(str(target), item_loader=loader.TokensLoader(block))
    return _rows(lambda number: made[number].numpy(), total)


def streaming(corpus: IndexedCorpus, folder: Path, total: int) -> Read:
    """Samples of an MDS folder on local disk, read at random."""
    mosaic: Any = importlib.import_module("streaming")
    target = str(folder / "mds")
    with mosaic.MDSWriter(out=target, columns={"tokens": "ndarray:uint16"}) as writer:
        for number in range(total):
            writer.write({"tokens": corpus.read(number * SEQ_LEN, number * SEQ_LEN + SEQ_LEN + 1).copy()})
    made = mosaic.StreamingDataset(local=target, batch_size=1)
    return _rows(lambda number: made[number]["tokens"], total)


def _rows(row: Callable[[int], Any], total: int) -> Read:
    """Tokens and labels from rows of ids, in random order."""
    order = np.random.default_rng(0).permutation(total).tolist()

    def read(first: int, count: int) -> None:
        for number in order[first : first + count]:
            ids = row(number).astype(np.int64)
            torch.from_numpy(ids[:-1].copy()), torch.from_numpy(ids[1:].copy())

    return read
