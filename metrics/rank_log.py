"""What libraries log and warn, and the stacks of a crash, in a file of this process's own."""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def rank_log(folder: Path, rank: int) -> Iterator[None]:
    """Send logging (INFO and up), warnings and fatal errors' stacks to folder/rank_<rank>.txt."""
    root, level = logging.getLogger(), logging.getLogger().level
    with (folder / f"rank_{rank:05d}.txt").open("a", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} begins\n")
        root.addHandler(handler)
        root.setLevel(min(level, logging.INFO) if level else logging.INFO)
        logging.captureWarnings(True)
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            logging.captureWarnings(False)
            root.setLevel(level)
            root.removeHandler(handler)
