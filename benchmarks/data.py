"""How fast do samples come from disk? Beside a raw copy of the same places, Megatron, litdata and MosaicML streaming.

python -m benchmarks.data [--rounds 200] [--samples 128] [--tokens 40e6] [--folder DIR] [--json FILE]

A corpus of random documents (log-normal, 660 tokens on average, uint16) is written to a temporary folder; its pages
are in memory. All contenders are in one process and take turns, in an order drawn anew every round; a turn is
`samples` samples of 2,048 tokens, each as fresh int64 tokens and labels on one thread. Time is the process's own, so
that waiting for a core does not count; what others do to the caches only ever adds to it, so a contender's quiet turns
are the fastest third of its own, and figures are medians of these.

`raw` is the limit: slices of a numpy memmap at the same random places, converted to int64, and nothing else, each 8
samples kept until the next 8 are made; `raw array` goes without the memmap's own slicing, slower than the copy.
`tatara, places given` is the packer alone: it also checks every id, gives positions and counts targets. `tatara` is the
loader with its order, one micro-batch of 8 samples a step; its masked form finds the document borders as well. What is
not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_others import SEQ_LEN, VOCAB, Read, others
from data.batch import Packer, Place
from data.corpus.indexed import IndexedCorpus
from data.corpus.joined import open_corpus
from data.corpus.writer import CorpusWriter
from data.loader import TrainLoader
from data.ramp import PlannedStep
from data.samples import Phase, Samples, Source, samples_of

PARTS = 8
MANY = 1000
MICRO_BATCH = 8
LIMIT = 1.3
"""Most that the packer may take of the raw copy's time, without document borders."""


@dataclass
class Contender:
    """Someone who makes samples, or finds their places."""

    name: str
    """Name in the table."""
    read: Read
    """Makes samples [first, first + count)."""
    turns: list[float] = field(default_factory=list)
    """Microseconds a sample of each turn."""

    @property
    def quiet(self) -> float:
        """Median of the fastest third of the turns, in microseconds a sample."""
        return statistics.median(sorted(self.turns)[: math.ceil(len(self.turns) / 3)])


def write_corpora(folder: Path, tokens: int) -> None:
    """The corpus `whole`, and the same documents in several parts."""
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.lognormal(6, 1, tokens // 660)).astype(np.int64)
    documents = [draw.integers(0, VOCAB, length, np.int64) for length in lengths]
    share = -(-len(documents) // PARTS)
    cuts = {"whole": documents} | {
        f"part{number}": documents[number * share : (number + 1) * share] for number in range(PARTS)
    }
    for name, chosen in cuts.items():
        with CorpusWriter(folder / name, "uint16") as writer:
            for document in chosen:
                writer.add_document(document)
            writer.finish(tokenizer="none", vocab_size=VOCAB, bytes_of_text=0)


def raw(stream: np.ndarray[tuple[int], np.dtype[np.uint16]], starts: list[int]) -> Read:
    """Slices of a stream of ids, as int64; a batch is there until the next one is made, as in training."""

    def pair(start: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = stream[start : start + SEQ_LEN], stream[start + 1 : start + 1 + SEQ_LEN]
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))

    def read(first: int, count: int) -> None:
        for at in range(first, first + count, MICRO_BATCH):
            batch = [pair(start) for start in starts[at : at + MICRO_BATCH]]
        del batch

    return read


def packed(places: list[Place], mask: bool) -> Read:
    """Micro-batches of places that are known, and how many targets they have."""
    packer = Packer(SEQ_LEN, mask, VOCAB)

    def read(first: int, count: int) -> None:
        for at in range(first, first + count, MICRO_BATCH):
            batch = packer.pack(places[at : at + MICRO_BATCH], range(at, at + MICRO_BATCH))
            batch.valid_tokens  # noqa: B018

    return read


def loaded(samples: Samples, mask: bool) -> Read:
    """Steps of a loader without a thread."""
    loader = TrainLoader(
        samples, sizes=[MICRO_BATCH], micro_batch=MICRO_BATCH, document_mask=mask, vocab_size=VOCAB, prefetch=0
    )

    def read(first: int, count: int) -> None:
        firsts = range(first, first + count, MICRO_BATCH)
        for _ in loader.steps(PlannedStep(at, range(at, at + MICRO_BATCH), False) for at in firsts):
            pass

    return read


def found(samples: Samples) -> Read:
    """Places alone."""

    def read(first: int, count: int) -> None:
        samples.places(range(first, first + count))

    return read


def contenders(folder: Path, total: int) -> Iterator[Contender]:
    """Everyone who takes part; each may be asked for the first `total` samples."""
    corpus = IndexedCorpus(folder / "whole")
    one = samples_of(Source("web", corpus, 0), SEQ_LEN)
    joined = samples_of(Source("web", open_corpus(folder / "part*"), 0), SEQ_LEN)
    parts = [Source(f"part{number}", IndexedCorpus(folder / f"part{number}"), 0) for number in range(PARTS)]
    mixed = Samples(parts, [Phase(0, {each.name: 3 + number for number, each in enumerate(parts)}, SEQ_LEN)])
    places = [one.place(sample) for sample in range(total)]
    starts = [start for _, start in places]
    memmap = np.memmap(corpus.bin_path, np.uint16, "r")
    yield Contender("raw", raw(memmap, starts))
    yield Contender("raw array", raw(np.asarray(memmap), starts))
    yield Contender("tatara, places given", packed(places, False))
    yield Contender("tatara, places given, document mask", packed(places, True))
    yield Contender("tatara", loaded(one, False))
    yield Contender("tatara, document mask", loaded(one, True))
    yield Contender(f"tatara, {PARTS} parts joined, document mask", loaded(joined, True))
    yield Contender(f"tatara, mixture of {PARTS}, document mask", loaded(mixed, True))
    yield Contender("order alone", found(one))
    yield Contender(f"order and mixture of {PARTS} alone", found(mixed))
    for name, read in others(corpus, folder, total):
        yield Contender(name, read)


def measure(everyone: list[Contender], rounds: int, count: int, total: int) -> None:
    """Let everyone take turns, over all samples again and again."""
    # In training larger arrays have taught malloc to keep memory; else each sample's would go back to the system.
    np.empty(24 << 20, np.uint8)
    draw = random.Random(0)
    for turn in range(rounds + 1):  # the first warms up
        first = turn * count % (total - count + 1) // MICRO_BATCH * MICRO_BATCH
        for contender in draw.sample(everyone, len(everyone)):
            began = time.process_time()
            contender.read(first, count)
            if turn:
                contender.turns.append((time.process_time() - began) / count * 1e6)


def open_times(folder: Path) -> dict[str, float]:
    """Milliseconds to open the corpus, its parts as one, and a thousand parts; the fastest of five."""
    many = folder / "many"
    many.mkdir()
    for number in range(MANY):
        for ending in (".bin", ".idx"):
            os.link(folder / f"part0{ending}", many / f"{number:04d}{ending}")
    asked = {"one corpus": folder / "whole", f"{PARTS} parts": folder / "part*", f"{MANY:,} parts": many / "*"}
    return {name: 1e3 * min(open_seconds(prefix) for _ in range(5)) for name, prefix in asked.items()}


def open_seconds(prefix: Path) -> float:
    """Time of one opening."""
    began = time.process_time()
    open_corpus(prefix)
    return time.process_time() - began


def table(everyone: list[Contender]) -> dict[str, float]:
    """Print a line a contender; microseconds a sample of each."""
    medians = {each.name: each.quiet for each in everyone}
    print(f"\n{'':44s} {'us/sample':>9s} {'all turns':>9s} {'/ raw':>7s} {'/ raw array':>11s}")
    for each in everyone:
        over = "".join(
            f" {medians[each.name] / medians[limit]:{room}.2f}" for limit, room in (("raw", 7), ("raw array", 11))
        )
        print(f"{each.name:44s} {medians[each.name]:9.2f} {statistics.median(each.turns):9.2f}{over}")
    return medians


def ratios(medians: dict[str, float]) -> dict[str, float]:
    """How ours stands to the raw copy, and the others to ours; print and return."""
    made = {f"{name} / raw": medians[name] / medians["raw"] for name in ("tatara, places given", "tatara")}
    made |= {
        f"{name} / tatara": medians[name] / medians["tatara"]
        for name in medians if not name.startswith(("tatara", "raw", "order"))
    }  # fmt: skip
    print()
    for name, ratio in made.items():
        limit = f"  (limit {LIMIT}: {'ok' if ratio <= LIMIT else 'MISSED'})" if name.endswith("/ raw") else ""
        print(f"{name:44s} {ratio:.2f} x{limit}")
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, help="turns of each contender (200)")
    parser.add_argument("--samples", type=int, default=128, help="samples of a turn, a multiple of 8 (128)")
    parser.add_argument("--tokens", type=float, default=40e6, help="tokens of the corpus (40e6)")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made (the system's place)")
    parser.add_argument("--json", type=Path, help="write medians, ratios and opening times here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total = min(32 * options.samples, int(0.9 * options.tokens) // SEQ_LEN)
    with tempfile.TemporaryDirectory(prefix="tatara-data-", dir=options.folder) as name:
        folder = Path(name)
        write_corpora(folder, int(options.tokens))
        everyone = list(contenders(folder, total))
        measure(everyone, options.rounds, options.samples, total)
        medians = table(everyone)
        found_ratios = ratios(medians)
        opening = open_times(folder)
        print("\nopening: " + ", ".join(f"{what} {milliseconds:.2f} ms" for what, milliseconds in opening.items()))
    if options.json:
        report = {"microseconds": medians, "ratios": found_ratios, "open_milliseconds": opening}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
