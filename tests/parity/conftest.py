"""One process's trial of each kind of training, run once for all layouts."""

from pathlib import Path

import pytest

from launch.tolerance import TOLERANCES
from launch.trial import run_trial, write_trial_corpus
from launch.verify import alone
from tests.parity.cases import MODEL


@pytest.fixture(scope="session")
def trial_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a corpus of uneven documents."""
    return write_trial_corpus(tmp_path_factory.mktemp("trial") / "corpus", MODEL.vocab_size or 0, 12_000)


@pytest.fixture(scope="session")
def reference(trial_corpus):
    """The trial of one process for a configuration, kept for the next layout."""
    kept = {}

    def of(config):
        config = alone(config)
        key = (config.model, config.precision, config.train.steps)
        if key not in kept:
            compared = TOLERANCES[config.precision.name].steps
            kept[key] = run_trial(config, trial_corpus, 1, config.train.steps, compared)
        return kept[key]

    return of
