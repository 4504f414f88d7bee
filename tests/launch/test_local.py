"""A whole run under local.sh, with torchrun and two ranks."""

import json
import signal
import subprocess
import sys
import time

from tests.conftest import ROOT
from tests.test_train import run_of


def local(*overrides):
    return subprocess.Popen(
        ["bash", "launch/local.sh", "--python", sys.executable, "--nproc", "2", *overrides],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def status(overrides):
    return json.loads((run_of(overrides) / "status.json").read_text())


def test_a_run_of_two_ranks_saves_on_a_signal_and_the_same_command_goes_on(tiny):
    words = [*tiny, "train.steps=5000"]
    with local(*words) as process:
        for line in process.stdout:
            if line.startswith("step") and int(line.split("/")[0].split()[1]) >= 3:
                break
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
    assert process.returncode == 75, said
    assert "Traceback" not in said and "SIGTERM: asked the run to save and end" in said
    stopped = status(words)
    assert (stopped["state"], stopped["code"]) == ("stopped", 75)
    with local(*words, f"train.stop_at={stopped['step'] + 2}") as process:
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert f"at step {stopped['step']}" in said
    assert status(words) == {"state": "paused", "code": 0, "step": stopped["step"] + 2, "attempt": 2}


def test_data_that_is_not_there_ends_it_with_3_though_no_status_was_written(tiny):
    words = [word for word in tiny if not word.startswith("data.sources=")]
    began = time.monotonic()
    with local(*words, "data.sources=[{name: a, prefix: /no/where}]") as process:
        said = process.stdout.read()
    assert process.returncode == 3 and time.monotonic() - began < 100
    assert "/no/where" in said and "Traceback" not in said
