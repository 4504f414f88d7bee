"""Which origin a source of a mixture names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from data.config import SourceConfig
from data.texts.dataset_origin import DatasetOrigin
from data.texts.documents import FirstDocuments
from data.texts.files_origin import FilesOrigin
from data.texts.origin import Origin
from data.texts.sotu import speeches
from data.texts.stdlib import library
from errors import DataRefused

_CORPORA: Mapping[str, Callable[[Path | None], Origin]] = {"stdlib": library, "sotu": speeches}


def origin_of(source: SourceConfig, *, streaming: bool = False, root: Path | None = None, workers: int = 1) -> Origin:
    """The texts of `source`: those of its corpus, input or dataset, cut to its max_documents.

    `streaming`: whether a dataset is read without downloading it whole. `root`: folder that a corpus is read from;
    None: its usual one. `workers`: processes that download a dataset. Raises DataRefused for a source without texts
    of its own, and for a corpus that is not there.
    """
    if source.dataset is not None:
        return _dataset(source, streaming, workers)
    if source.corpus is not None:
        origin = _CORPORA[source.corpus](root)
    elif source.input is not None:
        origin = FilesOrigin((source.input,), column=source.column)
    else:
        raise DataRefused(f"the source {source.name} has no texts to prepare: give it a corpus, an input or a dataset")
    return origin if source.max_documents is None else FirstDocuments(origin, source.max_documents)


def _dataset(source: SourceConfig, streaming: bool, workers: int) -> DatasetOrigin:
    return DatasetOrigin(
        name=source.dataset or "",
        subset=source.subset,
        split=source.split,
        revision=source.revision,
        data_files=source.data_files,
        column=source.column,
        streaming=streaming,
        max_documents=source.max_documents,
        workers=workers,
    )
