"""Minutes of the same promise: a run killed at random moments is the undisturbed run (`make soak`)."""

import json
import random
import signal
import time

import pytest

import train
from checkpoint.folder import list_checkpoints
from checkpoint.run_state import read_state
from checkpoint.store import read_tensors
from tests.conftest import losses, validations
from tests.test_comes_back_soak import attempt_of
from tests.test_train import run_of, start


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [[], ["precision=bf16", "precision.matmul=auto", "train.micro_batch=2"]])
def test_kills_at_random_moments_leave_the_losses_of_an_undisturbed_run(tiny, options):
    options = [*tiny, *options, "train.steps=400", "checkpoint.every=5", "checkpoint.keep=3"]
    assert train.main([*options, "run.name=whole"]) == 0
    draw, kills = random.Random(0), 0
    while kills < 30:
        before, process = attempt_of(run_of(tiny)), start(options)
        while process.poll() is None and attempt_of(run_of(tiny)) == before:
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 2.5))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        if (run_of(tiny) / "metrics.jsonl").exists():
            for line in (run_of(tiny) / "metrics.jsonl").read_text().splitlines()[:-1]:
                json.loads(line)
        for path in list_checkpoints(run_of(tiny) / "checkpoints"):
            assert read_state(path).step == int(path.name[-8:]) and read_tensors(path)
    assert train.main(options) == 0
    assert kills >= 3, "the run ended before it could be disturbed"
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))
    assert validations(run_of(tiny)) == validations(run_of(tiny, "whole"))
