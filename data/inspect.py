"""Look at a corpus: counts, lengths, how documents end, first samples, checksums; with --verify at every token.

python -m data.inspect PREFIX [--tokenizer PATH|bytes] [--samples 3] [--vocab-size N] [--verify] [--checksums] [--json]

PREFIX is a corpus in Megatron's .bin/.idx format without the endings, or a pattern (in quotes) such as
'shards/web_*' whose matches are read as one. Nothing is written. Exit code 3 where something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence

from data.corpus.joined import open_corpus
from data.corpus.lengths import bars
from data.corpus.overview import Asked, Ends, Overview, PartOverview, Sample, overview
from data.tokenizers.tokenizer import load_tokenizer
from errors import DataRefused, exit_code_of

_PARTS_SHOWN = 20
_CHARACTERS = 400
_IDS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: its exit code."""
    options = parser().parse_args(argv)
    return exit_code_of(lambda: inspect(options))


def parser() -> argparse.ArgumentParser:
    """Its flags."""
    made = argparse.ArgumentParser(
        prog="python -m data.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("prefix", metavar="PREFIX", help="path of a corpus without .bin or .idx, or a pattern in quotes")
    made.add_argument("--tokenizer", metavar="PATH", help="what made the corpus, to show text: a file, or bytes")
    made.add_argument("--samples", type=_count, default=3, help="first documents to show (3)")
    made.add_argument("--vocab-size", type=_positive, metavar="N", help="ids must be below it (as the tokenizer says)")
    made.add_argument("--verify", action="store_true", help="look at every entry of the index and every token")
    made.add_argument("--checksums", action="store_true", help="SHA-256 of the files (--verify does it as well)")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def inspect(options: argparse.Namespace) -> None:
    """Print what is asked for. Raises DataRefused where something is wrong, after everything else is said."""
    tokenizer = load_tokenizer(options.tokenizer, _progress) if options.tokenizer else None
    corpus = open_corpus(options.prefix)
    asked = Asked(options.samples, options.vocab_size, options.verify, options.checksums or options.verify)
    found = overview(corpus, asked, tokenizer, _progress)
    _print(json.dumps(dataclasses.asdict(found), indent=2) if options.json else "\n".join(text(found)))
    if found.faults:
        raise DataRefused("\n".join(found.faults))


def text(found: Overview) -> Iterator[str]:
    """The report, line by line."""
    rows = list(_rows(found))
    width = max(len(label) for label, _ in rows)
    yield f"{found.prefix}" + (f": {len(found.parts):,} parts" if len(found.parts) > 1 else "")
    yield from (f"  {label:<{width}}  {value}" for label, value in rows)
    yield "\ndocuments by length in tokens"
    yield from (f"  {line}" for line in bars(found.lengths.histogram))
    if len(found.parts) > 1 or found.parts[0].sha256:
        yield ""
        yield from _part_lines(found.parts)
    for sample in found.samples:
        yield from ("", f"document {sample.document}, {sample.tokens:,} tokens", *_sample_lines(sample))


def _rows(found: Overview) -> Iterator[tuple[str, str]]:
    lengths = found.lengths
    empty = f", {lengths.empty:,} of them without tokens" if lengths.empty else ""
    yield "tokens", f"{found.tokens:,} ({found.dtype})"
    yield "documents", f"{found.documents:,}{empty}"
    yield "bytes", f"{found.bytes:,}"
    yield (
        "tokens a document",
        (
            f"min {lengths.min:,}, median {lengths.median:,}, mean {lengths.mean:,.1f}, p99 {lengths.p99:,}, "
            f"max {lengths.max:,}"
        ),
    )
    yield "ends", _ends(found.ends)
    yield ".json", _beside(found.parts)
    yield "vocabulary", f"{found.vocab_size:,} entries" if found.vocab_size else "unknown (--vocab-size, --tokenizer)"
    yield "fingerprint", found.fingerprint
    yield "checked", _checked(found)


def _checked(found: Overview) -> str:
    if found.faults:
        return (
            f"{len(found.faults):,} faults, named at the end" if len(found.faults) > 1 else "a fault, named at the end"
        )
    if found.verified:
        return f"every entry of the index and every token (largest id {found.largest_id:,})"
    sampled = "index and ids" if found.vocab_size else "index"
    return f"sizes, and {sampled} at sampled places; --verify looks at all"


def _ends(ends: Ends) -> str:
    if not ends.documents:
        return "unknown"
    (common, count), *others = ends.documents.items()
    looked = f"{ends.looked_at:,} documents looked at"
    if others:
        shown = ", ".join(f"{count:,} with {token}" for token, count in list(ends.documents.items())[:3])
        return f"not with one id: of {looked} {shown}" + (", ..." if len(ends.documents) > 3 else "")
    inside = f"; it stands {ends.elsewhere:,} times elsewhere" if ends.elsewhere else ""
    return f"with id {common} in all of {looked}{inside}" if count > 1 else f"with id {common} ({looked})"


def _beside(parts: Sequence[PartOverview]) -> str:
    known = [part.metadata for part in parts if part.metadata]
    if not known:
        return "none (a corpus made elsewhere)"
    first = known[0]
    text_bytes, tokens = sum(each.bytes_of_text for each in known), sum(each.tokens for each in known)
    some = f"beside {len(known):,} of {len(parts):,} parts; " if len(known) < len(parts) else ""
    ratio = f", {text_bytes / tokens:.2f} bytes of text a token" if tokens else ""
    return f"{some}tokenizer {first.tokenizer[:16]}..., {first.vocab_size:,} entries{ratio}"


def _part_lines(parts: Sequence[PartOverview]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if part.sha256:
            yield from (f"{digest}  {part.prefix}.{ending}" for ending, digest in part.sha256.items())
        elif number < _PARTS_SHOWN:
            yield f"{part.tokens:>18,} tokens {part.documents:>13,} documents  {part.prefix}"
    if len(parts) > _PARTS_SHOWN and not parts[0].sha256:
        yield f"and {len(parts) - _PARTS_SHOWN:,} more (--json lists all)"


def _sample_lines(sample: Sample) -> Iterator[str]:
    if sample.text is None:
        more = " ..." if sample.tokens > _IDS else ""
        yield f"  | {' '.join(map(str, sample.ids[:_IDS]))}{more}"
        return
    # What is not printable could move the terminal's cursor or worse.
    shown = sample.text[:_CHARACTERS] + (" ..." if len(sample.text) > _CHARACTERS or sample.tokens > 256 else "")
    safe = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in shown)
    yield from (f"  | {line}" for line in safe.split("\n"))


def _print(report: str) -> None:
    try:
        print(report, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer must not complain at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _count(given: str) -> int:
    if not given.isdigit():
        raise argparse.ArgumentTypeError(f"{given} must be a whole number from 0 on")
    return int(given)


def _positive(given: str) -> int:
    if not given.isdigit() or int(given) == 0:
        raise argparse.ArgumentTypeError(f"{given} must be a whole number from 1 on")
    return int(given)


if __name__ == "__main__":
    sys.exit(main())
