"""python -m data.prepare: texts become a corpus in Megatron's .bin/.idx, which a run reads as it is.

The documents are encoded by N processes, shuffled as a whole, split and deduplicated on request. Killed at any
moment, the same command goes on where it stopped, and its files are the same to the last byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from data.preparing.preparation import Preparation, prepare
from data.preparing.workers import cores
from data.texts.files_origin import FilesOrigin
from data.texts.origin import Origin
from data.texts.text_options import add_text_options, check_text_options, given_origin
from errors import StopRequested, exit_code_of

_EXAMPLES = """examples:
  python -m data.prepare --corpus stdlib --tokenizer bytes --output corpora/python
  python -m data.prepare --input 'web/*.jsonl.zst' --column text --tokenizer llama.model --output corpora/web \\
      --validation corpora/web_held_out --held-out 0.001 --deduplicate --workers 32
  python -m data.prepare --input 'books/**/*.txt' --format text --tokenizer tokenizer.json --output corpora/books
  python -m data.prepare --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --streaming \\
      --max-documents 100000 --tokenizer tokenizer.json --output corpora/fineweb

Stopped or killed, the same command goes on where it was; finished, it says so. Exit codes: 0 done, 2 wrong flags,
3 texts, tokenizer or disk refused, 75 stopped on request.
"""
_PART_BYTES = (1 << 20, 64 << 20)
_PARTS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> None:
    preparation = Preparation(
        origin=_origin(given),
        tokenizer=given.tokenizer,
        output=Path(given.output).expanduser(),
        validation=Path(given.validation).expanduser() if given.validation else None,
        held_out=0.01 if given.held_out is None else given.held_out,
        seed=given.seed,
        workers=given.workers,
        deduplicate=given.deduplicate,
        min_bytes=given.min_bytes,
        max_bytes=given.max_bytes,
        max_documents=given.max_documents,
        allow_unreadable=given.allow_unreadable,
        overwrite=given.overwrite,
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        report = prepare(preparation, lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        raise StopRequested("stopped; nothing is lost: the same command goes on from here") from None
    print(report.table())
    print(f"train on it:\n  {_training_line(preparation)}")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _origin(given: argparse.Namespace) -> Origin:
    origin = given_origin(given, given.workers)
    return _files(origin) if isinstance(origin, FilesOrigin) else origin


def _files(origin: FilesOrigin) -> FilesOrigin:
    """The same files in parts that are small enough to share out; the cut depends on the files alone."""
    least, most = _PART_BYTES
    total = sum(part.size for part in origin.parts())
    return dataclasses.replace(origin, part_size=min(most, max(least, total // _PARTS)))


def _training_line(preparation: Preparation) -> str:
    source = f"name: {preparation.output.name}, prefix: {preparation.output}"
    if preparation.validation:
        source += f", validation: {preparation.validation}"
    return f"python train.py data=indexed 'data.sources=[{{{source}}}]' data.tokenizer={preparation.tokenizer}"


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends the program with exit code 2 for flags that do not go together."""
    check_text_options(parser, given)
    if given.held_out is not None and not given.validation:
        parser.error("--held-out needs --validation PREFIX, where the held-out documents go")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description=__doc__.partition(": ")[2],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_text_options(parser)
    _add_kept(parser.add_argument_group("what is kept"))
    _add_made(parser.add_argument_group("what is made"))
    return parser


def _add_kept(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--deduplicate", action="store_true", help="keep only the first of equal texts")
    group.add_argument("--min-bytes", type=int, default=0, metavar="N", help="leave out shorter texts")
    group.add_argument("--max-bytes", type=int, metavar="N", help="leave out longer texts")
    group.add_argument("--max-documents", type=int, metavar="N", help="read only the first N documents")
    group.add_argument("--allow-unreadable", action="store_true", help="report unreadable files instead of refusing")


def _add_made(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer", required=True, metavar="PATH", help="a .model, a tokenizer.json, or `bytes`")
    group.add_argument("--output", required=True, metavar="PREFIX", help="path of the corpus, without .bin and .idx")
    group.add_argument("--validation", metavar="PREFIX", help="path of the held-out corpus")
    group.add_argument("--held-out", type=float, metavar="SHARE", help="share of the documents for it (0.01)")
    group.add_argument("--seed", type=int, default=0, help="of the document shuffle (0)")
    group.add_argument("--workers", type=int, default=cores(), metavar="N", help=f"processes ({cores()} here)")
    group.add_argument("--overwrite", action="store_true", help="replace another corpus of that name")


if __name__ == "__main__":
    sys.exit(main())
