"""How fast does text become tokens, and are they the right ones? Beside the libraries that say what is right.

python -m benchmarks.tokenization [--processes 2] [--megabytes 6] [--rounds 5] [--input GLOB ...]

The same documents, shared out to the same processes of one thread each, are encoded by everyone in turn, in an order
drawn anew every round; figures are medians. `cold` is a tokenizer that was just loaded: its first texts are all
audited, and it has met no word before. `data.prepare` goes all the way from a jsonl file to a corpus on disk, its
processes' start included; the texts are written 4 times over (with tokenizer.json 20), or the start were much of the
time. The tokenizers are trained here on other documents, unless given. Last, all ids of ours are compared with the
libraries'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from data.preparing.preparation import Preparation, prepare
from data.texts.documents import documents_of
from data.texts.files_origin import FilesOrigin
from data.texts.stdlib import library
from data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece

_LIBRARIES = {"sentencepiece": "sentencepiece, bare", "json": "tokenizers, bare"}
_OURS = {
    "sentencepiece": "sentencepiece, ours",
    "json": "tokenizer.json, ours",
    "json cold": "tokenizer.json, ours, cold",
}
_PREPARED = {"sentencepiece": "data.prepare with sentencepiece", "json": "data.prepare with tokenizer.json"}
_VOCABULARY = 8192
_TIMES = {"sentencepiece": 4, "json": 20}  # the texts are prepared, or the start were much of the time
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
Encode = Callable[[list[str]], Sequence[Any]]


@dataclass(frozen=True)
class Files:
    """What the measured processes read."""

    sentencepiece: str
    """Path of the model."""
    json: str
    """Path of the tokenizer.json."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenization", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=6.0, help="text to encode (6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input", nargs="+", metavar="GLOB", help="texts (the standard library's)")
    parser.add_argument("--model", metavar="PATH", help="a sentencepiece .model (one trained here)")
    parser.add_argument("--json", metavar="PATH", help="a tokenizer.json (one trained here)")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel
    with tempfile.TemporaryDirectory(prefix="tokenization-") as folder:
        measured, training = _texts(given.input, given.megabytes)
        files = _tokenizers(Path(folder), training, given.model, given.json)
        size = sum(len(text.encode()) for text in measured)
        print(f"{size / 1e6:.1f} MB in {len(measured):,} documents, {given.processes} processes", flush=True)
        _report(_measure(Path(folder), files, measured, given.processes, given.rounds), size)
        _compare(files, measured)


def _texts(patterns: Sequence[str] | None, megabytes: float) -> tuple[list[str], list[str]]:
    """Documents to encode, about so many bytes of them, and others to train on."""
    if patterns:
        texts = [document.text for document in documents_of(FilesOrigin(tuple(patterns)))]
    else:
        texts = [document.text for document in documents_of(library())]
        random.Random(0).shuffle(texts)
    count = size = 0
    for text in texts:
        if size > megabytes * 1e6:
            break
        size, count = size + len(text.encode()), count + 1
    return texts[:count], texts[count : count + 200] or texts


def _tokenizers(folder: Path, texts: list[str], model: str | None, definition: str | None) -> Files:
    if model is None:
        model = str(train_sentencepiece(texts, _VOCABULARY, folder / "trained.model").path)
    if definition is None:
        definition = str(folder / "trained.json")
        _train_json(texts, definition)
    return Files(model, definition)


def _train_json(texts: list[str], path: str) -> None:
    """A byte-level BPE with Llama 3's way to cut words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_CUT), "isolated"), bytes_after])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(path)


def _encoder(name: str, files: Files) -> Encode:
    """A contender's function from texts to ids."""
    path = files.sentencepiece if name.startswith("sentencepiece") else files.json
    if name in _OURS.values():
        return load_tokenizer(path).encode_batch
    if name.startswith("sentencepiece"):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=path)
        return lambda texts: processor.encode(texts, num_threads=1)
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(path)
    reference.encode_special_tokens = True
    return lambda texts: [each.ids for each in reference.encode_batch(texts, add_special_tokens=False)]


def _worker(files: Files, texts: list[str], orders: Connection[Any, Any]) -> None:
    """A process: for each name that it is told it says when it is ready, then encodes its texts when told to."""
    kept = {name: _encoder(name, files) for name in (*_LIBRARIES.values(), *_OURS.values())}
    while name := orders.recv():
        encode = _encoder(name, files) if name == _OURS["json cold"] else kept[name]
        orders.send("ready")
        orders.recv()
        encode(texts)
        orders.send("done")


def _measure(folder: Path, files: Files, texts: list[str], processes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender, a round each."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(processes)]
    workers = [
        spawn.Process(target=_worker, args=(files, texts[number::processes], theirs), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    ends = [ours for ours, _ in pipes]
    runs: dict[str, Callable[[], float]] = {
        name: lambda name=name: _turn(ends, name)  # type: ignore[misc]
        for name in (*_LIBRARIES.values(), *_OURS.values())
    }
    for kind, name in _PREPARED.items():
        path, times = (files.sentencepiece if kind == "sentencepiece" else files.json), _TIMES[kind]
        written = _written(folder / f"{kind}.jsonl", texts * times)
        runs[name] = lambda path=path, written=written, times=times: (  # type: ignore[misc]
            _prepared(folder, written, path, processes) / times
        )
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(sorted(runs), len(runs)):
            seconds[name].append(runs[name]())
    for end in ends:
        end.send("")
    return seconds


def _turn(ends: Sequence[Connection[Any, Any]], name: str) -> float:
    """Seconds from the word to the last process's end."""
    for end in ends:
        end.send(name)
    for end in ends:
        end.recv()
    began = time.perf_counter()
    for end in ends:
        end.send("go")
    for end in ends:
        end.recv()
    return time.perf_counter() - began


def _written(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def _prepared(folder: Path, texts: Path, tokenizer: str, processes: int) -> float:
    """Seconds of a whole preparation, the start of its processes and the loading of the tokenizer included."""
    origin = FilesOrigin((str(texts),), part_size=1 << 20)
    began = time.perf_counter()
    prepare(Preparation(origin, tokenizer, folder / "corpus", workers=processes, overwrite=True), lambda line: None)
    seconds = time.perf_counter() - began
    for path in folder.glob("corpus*"):
        path.unlink()
    return seconds


def _report(seconds: dict[str, list[float]], size: int) -> None:
    rates = {name: size / 1e6 / statistics.median(each) for name, each in seconds.items()}
    print(f"\n{'':36s} {'MB/s':>8s} {'lowest':>8s} {'highest':>8s}   {'x library':>9s}")
    for name, each in seconds.items():
        library = _LIBRARIES["sentencepiece" if "sentencepiece" in name else "json"]
        low, high = size / 1e6 / max(each), size / 1e6 / min(each)
        print(f"{name:36s} {rates[name]:8.1f} {low:8.1f} {high:8.1f}   {rates[name] / rates[library]:9.2f}")


def _compare(files: Files, texts: list[str]) -> None:
    """Print how many documents have other ids than the library gives; it must be none."""
    differing = 0
    for kind, bare in _LIBRARIES.items():
        right = _encoder(bare, files)(texts)
        found = _encoder(_OURS[kind], files)(texts)
        count = sum(list(theirs) != ours.tolist() for theirs, ours in zip(right, found, strict=True))
        print(f"{'documents with other ids than ' + bare:50s} {count} of {len(texts):,}")
        differing += count
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
