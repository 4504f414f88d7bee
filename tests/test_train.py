"""Whole runs: what they leave behind, and that nothing but the training decides their numbers."""

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import train
from checkpoint.folder import locate
from checkpoint.tensors import read_whole
from metrics import report
from model import generate
from model.build import build
from model.config import ModelConfig
from optim.config import OptimConfig
from optim.updater import Updater
from parallel.mesh import ONE_PROCESS
from parallel.shards import shards_of
from tests.conftest import ROOT, losses, records, validations, write_corpus

CONTRACT = {
    "config.yaml", "overrides.txt", "environment.txt", "status.json", "log.txt", "logs", "metrics.jsonl", "checkpoints",
}  # fmt: skip
KEYS = {
    "step", "attempt", "loss", "aux", "grad_norm", "lr", "tokens", "samples", "tokens_per_s", "mfu", "hfu",
    "step_time", "time", "memory_gb", "skipped", "goodput",
}  # fmt: skip


def run_of(overrides, name="tiny"):
    return Path(next(o for o in overrides if o.startswith("run.dir=")).split("=", 1)[1]) / name


def test_a_run_leaves_every_file_of_the_contract_and_learns(tiny):
    assert train.main([*tiny, "train.steps=60", "optim.lr=1e-2"]) == 0
    run = run_of(tiny)
    assert {p.name for p in run.iterdir()} >= CONTRACT
    assert json.loads((run / "status.json").read_text()) == {"state": "done", "code": 0, "step": 60, "attempt": 1}
    assert (run / "checkpoints" / "latest").read_text() == "step_00000060\n"
    steps = [r for r in records(run) if "event" not in r]
    assert [r["step"] for r in steps] == list(range(1, 61))
    for r in steps:
        assert set(r) == KEYS
        assert sum(r["time"].values()) == pytest.approx(r["step_time"])
        assert r["tokens"] == r["step"] * 8 * 32 and r["samples"] == r["step"] * 8
    values = validations(run)
    assert sorted(values) == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert values[60] < 0.6 * values[7] < 0.7 * math.log(96)
    assert list((run / "logs").glob("rank_*.txt"))


def test_a_finished_run_started_again_says_so_and_changes_nothing(tiny, capsys):
    assert train.main([*tiny, "train.steps=3"]) == 0
    before = (run_of(tiny) / "metrics.jsonl").read_text()
    assert train.main([*tiny, "train.steps=3", "optim.lr=0.5"]) == 2
    assert json.loads((run_of(tiny) / "status.json").read_text())["code"] == 2
    (run_of(tiny) / "stop").touch()
    capsys.readouterr()
    assert train.main([*tiny, "train.steps=3"]) == 0
    assert "at step 3 of 3: done" in capsys.readouterr().out
    assert (run_of(tiny) / "metrics.jsonl").read_text() == before
    status = json.loads((run_of(tiny) / "status.json").read_text())
    assert (status["state"], status["code"]) == ("done", 0)
    assert not (run_of(tiny) / "stop").exists()


def start(overrides):
    return subprocess.Popen(
        [sys.executable, "train.py", *overrides], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_at(process, line):
    """SIGKILL as soon as the process has printed a line that begins so; None if it ended before."""
    for said in process.stdout:
        if said.lstrip().startswith(line):
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    return process.returncode


@pytest.mark.parametrize(
    "kill, options",
    [
        (["step  8", "step 17"], []),
        (["step 13"], ["precision=bf16", "precision.matmul=auto", "train.micro_batch=8"]),
        pytest.param(["validation at step 14", "saved"], ["train.micro_batch=2"], marks=pytest.mark.soak),
        pytest.param(["step 19"], ["checkpoint.every=1", "data.document_mask=false"], marks=pytest.mark.soak),
    ],
)
def test_a_run_killed_and_started_again_gives_bitwise_the_losses_of_an_undisturbed_one(tiny, kill, options):
    """The corpus has 14 steps an epoch, so that every case crosses a validation and an epoch's end."""
    assert train.main([*tiny, *options, "run.name=whole"]) == 0
    for line in kill:
        assert kill_at(start([*tiny, *options]), line) == -signal.SIGKILL
    assert train.main([*tiny, *options]) == 0
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))
    assert validations(run_of(tiny)) == validations(run_of(tiny, "whole"))
    assert any(r.get("event") == "resume" for r in records(run_of(tiny)))


def test_a_run_stopped_early_and_led_on_equals_an_undisturbed_one_bitwise(tiny):
    assert train.main([*tiny, "run.name=whole"]) == 0
    for stop_at in (5, 6, 13, 20):
        assert train.main([*tiny, f"train.stop_at={stop_at}"]) == 0
        assert json.loads((run_of(tiny) / "status.json").read_text())["step"] == stop_at
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))


def test_two_identical_runs_are_bitwise_equal(tiny):
    for name in ("a", "b"):
        assert train.main([*tiny, f"run.name={name}", "train.threads=2", "train.steps=5"]) == 0
    assert losses(run_of(tiny, "a")) == losses(run_of(tiny, "b"))
    weights = [read_whole(locate(run_of(tiny, name)), "", None) for name in "ab"]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize("precision, tolerance", [pytest.param("fp32", 1e-6, marks=pytest.mark.soak), ("fp64", 1e-13)])
def test_the_micro_batch_size_never_changes_the_training(tiny, precision, tolerance):
    for size in (1, 2, 4, 8):
        options = [f"precision={precision}", f"train.micro_batch={size}", f"run.name=m{size}", "precision.matmul=auto"]
        assert train.main([*tiny, *options]) == 0
    one = losses(run_of(tiny, "m1"))
    for size in (2, 4, 8):
        other = losses(run_of(tiny, f"m{size}"))
        assert max(abs(one[s][0] - other[s][0]) for s in one) < tolerance
        held = validations(run_of(tiny, "m1")), validations(run_of(tiny, f"m{size}"))
        assert max(abs(held[0][s] - held[1][s]) for s in held[0]) < tolerance


def test_a_stop_file_saves_and_ends_with_75_and_the_same_command_goes_on(tiny):
    assert train.main([*tiny, "run.name=whole"]) == 0
    process = start(tiny)
    for said in process.stdout:
        if said.lstrip().startswith("step  3"):
            (run_of(tiny) / "stop").touch()
            break
    process.communicate()
    assert process.returncode == 75
    status = json.loads((run_of(tiny) / "status.json").read_text())
    assert status["state"] == "stopped" and status["code"] == 75
    assert train.main(tiny) == 0
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.soak) for each in (signal.SIGINT, signal.SIGUSR1))],
)
def test_a_signal_saves_and_ends_with_75_and_the_same_command_goes_on(tiny, number):
    assert train.main([*tiny, "run.name=whole", "train.steps=300", "train.stop_at=150", "train.eval_every=0"]) == 0
    process = start([*tiny, "train.steps=300", "train.eval_every=0", "checkpoint.every=0"])
    for said in process.stdout:
        if said.lstrip().startswith("step   3"):
            process.send_signal(number)
            break
    said, _ = process.communicate()
    assert process.returncode == 75 and f"stopped by {number.name}" in said
    status = json.loads((run_of(tiny) / "status.json").read_text())
    assert (status["state"], status["code"]) == ("stopped", 75) and 3 <= status["step"] < 150
    assert train.main([*tiny, "train.steps=300", "train.stop_at=150", "train.eval_every=0"]) == 0
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_second_signal_ends_at_once_and_harms_nothing(tiny, number):
    """In a step that never ends."""
    assert train.main([*tiny, "run.name=whole"]) == 0
    process = start([*tiny, "checkpoint.every=3", "debug.inject=[{kind: hang, step: 8}]"])
    for said in process.stdout:
        if said.startswith("debug.inject"):
            break
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode in (-number, 128 + number) and "Traceback" not in said
    assert train.main(tiny) == 0
    assert [r["step"] for r in records(run_of(tiny)) if r.get("event") == "resume"] == [6]
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "status.json", "stop", "wandb"])
def test_a_folder_where_a_file_should_be_is_refused_not_a_traceback(tiny, name, capsys):
    assert train.main([*tiny, "train.stop_at=3"]) == 0
    path = run_of(tiny) / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    assert train.main(tiny) in (2, 3)
    said = capsys.readouterr().err
    assert name in said and "Traceback" not in said


def test_a_closed_stdout_does_not_end_a_run(tiny):
    command = f"{sys.executable} train.py " + " ".join(f'"{o}"' for o in tiny)
    piped = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], cwd=ROOT, capture_output=True)
    assert piped.returncode == 0
    assert max(losses(run_of(tiny))) == 20


def test_a_resume_prints_free_changes_and_refuses_those_of_the_training(tiny, capsys):
    assert train.main([*tiny, "train.stop_at=3"]) == 0
    capsys.readouterr()
    assert train.main([*tiny, "train.stop_at=4", "train.micro_batch=2"]) == 0
    said = capsys.readouterr().out
    assert "changed since then: train.micro_batch: 4 -> 2" in said
    assert train.main([*tiny, "optim.lr=5e-4"]) == 2
    assert "optim.lr: 0.001 -> 0.0005" in capsys.readouterr().err
    assert json.loads((run_of(tiny) / "status.json").read_text())["code"] == 2
    assert train.main([*tiny, "optim.lr=5e-4", "checkpoint.allow=[optim.lr]"]) == 0


def test_what_is_accepted_already_is_in_the_fix_of_the_next_refusal(tiny, capsys):
    assert train.main([*tiny, "train.stop_at=2"]) == 0
    assert train.main([*tiny, "optim.lr=1e-4", "optim.clip=2", "checkpoint.allow=[optim.lr]"]) == 2
    assert "checkpoint.allow=[optim.lr,optim.clip]" in capsys.readouterr().err


def test_something_to_allow_without_a_checkpoint_is_told(tiny, capsys):
    assert train.main([*tiny, "train.stop_at=1", "checkpoint.allow=[optim.lr]"]) == 0
    assert "checkpoint.allow=[optim.lr] has nothing to allow: tiny has no checkpoint" in capsys.readouterr().out


def test_fp64_and_other_precisions_never_go_on_from_each_other(tiny, capsys):
    tiny = [o for o in tiny if not o.startswith("precision.matmul")]
    assert train.main([*tiny, "train.stop_at=1"]) == 0
    for allowed in ([], ["checkpoint.allow=[precision.name]"]):
        assert train.main([*tiny, "precision=fp64", *allowed]) == 2
        said = capsys.readouterr().err
        assert "precision.name: fp32 -> fp64" in said and "write precision=fp32" in said and "allow" not in said


def test_a_run_that_ends_without_a_finite_loss_has_diverged(tiny, capsys):
    assert train.main([*tiny, "optim.lr=1e20", "train.steps=8", "train.max_skips=1000"]) == 4
    assert "the validation loss of small is not finite: the model is past use" in capsys.readouterr().err
    assert json.loads((run_of(tiny) / "status.json").read_text())["code"] == 4


def test_a_run_of_which_no_step_changed_anything_has_diverged(tiny, capsys):
    tiny = [*(o for o in tiny if not o.startswith("precision.matmul")), "precision=fp16", "train.steps=5"]
    assert train.main([*tiny, "precision.fp16.initial=1099511627776"]) == 4
    assert "none of the run's 5 steps changed anything" in capsys.readouterr().err


def test_a_layout_that_changes_the_training_says_so_on_a_resume(tiny, capsys):
    moe = "model.moe={experts: 4, top_k: 2, ffn: 16, balance: batch}"
    assert train.main([*tiny, moe, "train.stop_at=3"]) == 0
    assert "this changes the training" not in capsys.readouterr().out
    assert train.main([*tiny, moe, "train.micro_batch=2", "train.stop_at=5"]) == 0
    assert "warning: this changes the training, since model.moe.balance=batch" in capsys.readouterr().out


def test_a_changed_corpus_under_the_same_name_is_refused(tiny, corpus, tmp_path, capsys):
    other = write_corpus(tmp_path / "other", 60, seed=9)
    assert train.main([*tiny, "train.stop_at=3"]) == 0
    sources = f"data.sources=[{{name: small, prefix: '{other}', validation: '{corpus.parent / 'held'}'}}]"
    settings = (run_of(tiny) / "config.yaml").read_text()
    assert train.main([*tiny, sources, "checkpoint.allow=[data.sources]"]) == 3
    assert "trained on other data" in capsys.readouterr().err
    assert (run_of(tiny) / "config.yaml").read_text() == settings  # nothing was trained with the others


def test_gradients_that_are_not_finite_are_skipped_recorded_and_at_last_stop_the_run(tiny, capsys):
    """A learning rate beyond all measure makes the weights, then the loss, overflow."""
    assert train.main([*tiny, "optim.lr=1e38", "lr_schedule.warmup=0", "train.max_skips=4"]) == 4
    said = capsys.readouterr().err
    assert "steps in a row had gradients that are not finite" in said and "There is no checkpoint" in said
    run = run_of(tiny)
    assert [r["event"] for r in records(run) if r.get("event") == "skip"] == ["skip"] * 4
    broken = [r for r in records(run) if "nonfinite" in r]
    assert broken and all(r[k] is None for r in broken for k in r["nonfinite"] if "." not in k)
    assert json.loads((run / "status.json").read_text())["state"] == "diverged"


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_model_of_a_few_layers_overfits_one_batch(compute):
    shape = ModelConfig(hidden=64, layers=3, heads=4, kv_heads=2, ffn=128, vocab_size=96)
    model = build(shape, 1, torch.device("cpu"), torch.float32)
    updater = Updater(shards_of(model, ONE_PROCESS), OptimConfig(weight_decay=0.0), compute)
    tokens = torch.randint(0, 96, (4 * 64 + 1,), generator=torch.Generator().manual_seed(0))
    positions, borders = torch.arange(64).repeat(4), torch.arange(0, 257, 64, dtype=torch.int32)
    for _ in range(150):
        sums = model(tokens[:-1], tokens[1:], positions, borders, 64, documents=False, scale=1 / 256)
        sums.objective.backward()
        updater.step(3e-3)
    assert sums.objective.item() < 0.05


def test_skips_stop_the_run_in_time_however_rarely_steps_are_recorded(tiny):
    options = ["optim.lr=1e38", "lr_schedule.warmup=0", "train.max_skips=4", "metrics.every=1000", "checkpoint.every=2"]
    assert train.main([*tiny, *options, "checkpoint.keep=0"]) == 4
    run = run_of(tiny)
    skips = [r["step"] for r in records(run) if r.get("event") == "skip"]
    assert len(skips) == 4 and skips == list(range(skips[0], skips[0] + 4))
    assert json.loads((run / "status.json").read_text())["code"] == 4


def test_an_accepted_change_of_the_batch_still_ends_at_the_last_step(tiny):
    assert train.main([*tiny, "train.stop_at=10"]) == 0
    for batch, stop_at in ((16, 15), (4, 20)):
        change = [f"train.global_batch={batch}", f"train.stop_at={stop_at}", "checkpoint.allow=[train.global_batch]"]
        assert train.main([*tiny, *change]) == 0
        last = [r for r in records(run_of(tiny)) if "event" not in r][-1]
        assert last["step"] == stop_at
    assert last["samples"] == 10 * 8 + 5 * 16 + 5 * 4


def test_a_second_process_is_kept_out_of_a_runs_folder(tiny, launch):
    process = start([*tiny, "train.steps=100000", "checkpoint.every=0"])
    for said in process.stdout:
        if said.lstrip().startswith("step"):
            break
    second = launch(*tiny)
    process.kill()
    process.communicate()
    assert second.returncode == 2 and "another process is training in" in second.stderr
    assert json.loads((run_of(tiny) / "status.json").read_text())["state"] == "running"


def test_wandb_is_offline_and_one_run_after_a_resume(tiny):
    options = [*tiny, "metrics.wandb=offline", "train.steps=4"]
    for stop_at in (2, 4):
        assert train.main([*options, f"train.stop_at={stop_at}"]) == 0
    starts = list((run_of(tiny) / "wandb").glob("offline-run-*"))
    ids = {path.name.rsplit("-", 1)[1] for path in starts}
    assert len(starts) == 2 and len(ids) == 1


def test_a_compiled_run_trains_as_an_eager_one(tiny):
    torch._dynamo.reset()
    counters.clear()
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        assert train.main([*tiny, f"run.name={name}", f"train.compile={compiled}", "train.steps=3"]) == 0
    assert counters["stats"]["unique_graphs"] >= 2  # a block with gradients, and one without
    eager, fused = losses(run_of(tiny, "eager")), losses(run_of(tiny, "compiled"))
    assert all(fused[s] == pytest.approx(eager[s], rel=1e-5) for s in eager)
    assert validations(run_of(tiny, "compiled"))[3] == pytest.approx(validations(run_of(tiny, "eager"))[3], rel=1e-5)


def test_the_default_data_prepares_itself_and_its_model_speaks(tmp_path, capsys):
    options = [
        "model.hidden=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=48", "train.seq_len=64",
        "train.steps=2", "train.global_batch=2", "train.micro_batch=2", "train.eval_samples=2", "train.compile=true",
        f"run.dir={tmp_path}", "run.name=text", f"data.cache={tmp_path / 'cache'}", "metrics.wandb=disabled",
    ]  # fmt: skip
    assert train.main(options) == 0
    said = capsys.readouterr().out
    assert "unigram entropy" in said and "a sample:\ndef " in said
    assert generate.main([str(tmp_path / "text"), "--prompt", "import os", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("import os")
    assert generate.main([str(tmp_path / "nowhere")]) == 3
    assert "holds no checkpoint" in capsys.readouterr().err
    assert report.main([str(tmp_path / "text")]) == 0
    assert (tmp_path / "text" / "report.png").stat().st_size > 10_000
