"""A small corpus and a fast run, shared by the tests of whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpus.writer import CorpusWriter

ROOT = Path(__file__).parent.parent
VOCAB = 96


def write_corpus(prefix: Path, documents: int, seed: int, vocab: int = VOCAB) -> Path:
    """Random documents with a pattern that can be learnt: each token is near the one before it."""
    rng = np.random.default_rng(seed)
    with CorpusWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            steps = rng.integers(0, 3, rng.integers(5, 120))
            writer.add_document((rng.integers(vocab) + steps.cumsum()) % vocab)
        writer.finish(tokenizer="0" * 64, vocab_size=vocab, bytes_of_text=documents * 200)
    return prefix


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a training corpus of some 3,700 tokens; a held-out one lies beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "held", 20, seed=2)
    return write_corpus(folder / "train", 60, seed=1)


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run that takes milliseconds a step."""
    source = f"[{{name: small, prefix: '{corpus}', validation: '{corpus.parent / 'held'}'}}]"
    return [
        "data=indexed", f"data.sources={source}", f"run.dir={tmp_path / 'runs'}", "run.name=tiny",
        "model.hidden=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=48",
        "train.seq_len=32", "train.global_batch=8", "train.micro_batch=4", "train.steps=20", "train.eval_every=7",
        "train.eval_samples=10", "train.threads=1", "precision.matmul=highest", "metrics.wandb=disabled",
        "metrics.peak_tflops=1", "checkpoint.every=6", "optim.lr=1e-3",
    ]  # fmt: skip


@pytest.fixture
def launch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python train.py` with overrides, as a user does."""

    def started(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "train.py", *overrides],
            cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return started


def records(run: Path) -> list[dict[str, Any]]:
    """Every object of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm by step, of the last time each step was made."""
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(run) if "event" not in r}


def validations(run: Path) -> dict[int, float]:
    """Validation loss by step."""
    return {r["step"]: r["val_loss"] for r in records(run) if r.get("event") == "validation"}
