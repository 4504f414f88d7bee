"""python -m data.train_tokenizer: a sentencepiece tokenizer from a sample of texts.

The same texts, options and version of sentencepiece give the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.progress import Meter, Say, megabytes
from data.texts.documents import documents_of
from data.texts.origin import Origin
from data.texts.text_options import add_text_options, check_text_options, given_origin
from data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from errors import DataRefused, exit_code_of

_EXAMPLES = """examples:
  python -m data.train_tokenizer --corpus stdlib --vocab-size 8192 --output python.model
  python -m data.train_tokenizer --input 'web/*.jsonl.zst' --vocab-size 32000 --max-bytes 1e9 --output web.model
  python -m data.train_tokenizer --input 'books/**/*.txt' --kind unigram --output books.model

Exit codes: 0 done, 2 wrong flags, 3 texts, vocabulary size or disk refused.
"""
_HELD_BACK_ONE_IN = 100


@dataclass(frozen=True)
class Sample:
    """Texts to train on, and others to see how well it went."""

    training: Sequence[str]
    """In the order of the draw."""
    held_back: Sequence[str]
    """One in 100 of the drawn texts, at least one; none where only one text was drawn."""
    documents: int
    """Documents that the texts were drawn from."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    check_text_options(parser, given)
    return exit_code_of(lambda: _run(given))


def draw_sample(origin: Origin, max_bytes: int, seed: int, say: Say) -> Sample:
    """Documents drawn by `seed` and their keys alone, each as likely as any other, up to `max_bytes` of UTF-8.

    Reads the whole origin once and holds no more than the sample; at least one document is in it. Raises DataRefused
    where there is none.
    """
    heap: list[tuple[int, str, str, int]] = []  # the last of the draw first: -place, key, text, bytes
    documents = size = read = 0
    with Meter("drawing texts", say, lambda _: None) as meter:
        for document in documents_of(origin):
            text_bytes = len(document.text.encode())
            documents, read, size = documents + 1, read + text_bytes, size + text_bytes
            heapq.heappush(heap, (-_place(seed, document.key), document.key, document.text, text_bytes))
            while size > max_bytes and len(heap) > 1:
                size -= heapq.heappop(heap)[3]
            meter.update(read, None)
    if not heap:
        raise DataRefused("there is no text to train a tokenizer on: give files or a corpus that hold some")
    texts = [text for _, _, text, _ in sorted(heap, reverse=True)]
    held_back = math.ceil(len(texts) / _HELD_BACK_ONE_IN) if len(texts) > 1 else 0
    return Sample(texts[held_back:], texts[:held_back], documents)


def _place(seed: int, key: str) -> int:
    """Where a document stands in the draw."""
    digest = hashlib.blake2b(f"draw {seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _run(given: argparse.Namespace) -> None:
    output = Path(given.output).expanduser()
    if output.exists() and not given.overwrite:
        raise DataRefused(
            f"{output} is there already, and corpora may have been made with it: choose another --output, or add "
            "--overwrite"
        )
    _require_folder(output.parent)
    sample = draw_sample(given_origin(given), given.max_bytes, given.seed, _say)
    size = sum(len(text.encode()) for text in sample.training)
    _say(
        f"training {given.vocab_size:,} entries ({given.kind}) on {len(sample.training):,} of {sample.documents:,} "
        f"documents, {megabytes(size)}"
    )
    tokenizer = train_sentencepiece(sample.training, given.vocab_size, output, given.kind)
    print(f"{output}: {tokenizer.vocab_size:,} entries, SHA-256 {tokenizer.fingerprint}")
    if sample.held_back:
        print(f"{bytes_per_token(tokenizer, sample.held_back):.3f} bytes a token on held-back text")


def _require_folder(folder: Path) -> None:
    """Makes the folder, so that hours of training do not end without a place for their result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataRefused(f"nothing can be written to {folder} ({error.strerror}): choose another --output") from error


def bytes_per_token(tokenizer: SentencePieceTokenizer, texts: Sequence[str]) -> float:
    """UTF-8 bytes of the texts a token."""
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    return sum(len(text.encode()) for text in texts) / max(tokens, 1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    """A whole number above 0, also as 1e9."""
    value = float(text)
    if not 1 <= value < 2**62 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.train_tokenizer",
        description=__doc__.partition(": ")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_text_options(parser)
    made = parser.add_argument_group("what is made")
    made.add_argument("--output", required=True, metavar="PATH", help="the tokenizer's file, such as web.model")
    made.add_argument("--vocab-size", type=_positive, default=32_000, metavar="N", help="its entries (32000)")
    made.add_argument("--kind", choices=("bpe", "unigram"), default="bpe", help="how texts are cut (bpe)")
    made.add_argument("--max-bytes", type=_positive, default=10**9, metavar="N",
                      help="text to train on at most, held in memory (1e9)")  # fmt: skip
    made.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    made.add_argument("--overwrite", action="store_true", help="replace a tokenizer of that name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
