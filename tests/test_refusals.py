"""Every wrong invocation is answered by what was wrong, the rule and the fix, and by its exit code."""

import time

import numpy as np
import pytest

import train
from data.corpus.writer import CorpusWriter
from tests.conftest import write_corpus

REFUSED = {
    "a mistyped section": (["trian.steps=3"], 2, ["trian.steps", "train.steps"]),
    "a mistyped key": (["train.stepss=3"], 2, ["train.stepss", "train.steps"]),
    "a key without its section": (["lr=1e-3"], 2, ["lr", "optim.lr"]),
    "an unknown group choice": (["model=nanno"], 2, ["nanno", "nano"]),
    "a key added with a plus": (["+model.hiden=3"], 2, ["+model.hiden", "model.hidden"]),
    "an invented key": (["+x=1"], 2, ["+x", "extra"]),
    "text for a number": (["train.steps=many"], 2, ["many", "train.steps"]),
    "a fraction for a count": (["model.layers=2.5"], 2, ["2.5", "model.layers"]),
    "an unknown word": (["model.activation=relu"], 2, ["relu", "swiglu"]),
    "a value for a section": (["train=3"], 2, ["train"]),
    "nothing to train": (["train.steps=0"], 2, ["train.steps", "0"]),
    "a negative size": (["model.hidden=-8"], 2, ["model.hidden", "-8"]),
    "a batch that does not divide": (["train.micro_batch=3"], 2, ["train.micro_batch", "train.global_batch"]),
    "heads that do not divide": (["model.kv_heads=3"], 2, ["model.kv_heads", "model.heads"]),
    "an odd head": (["model.head_dim=15"], 2, ["model.head_dim", "15"]),
    "two lengths": (["train.steps=3", "train.tokens=9999"], 2, ["train.steps", "train.tokens"]),
    "a stop after the end": (["train.stop_at=900"], 2, ["train.stop_at", "900"]),
    "a warm-up longer than the run": (["lr_schedule.warmup=400"], 2, ["lr_schedule.warmup", "400"]),
    "a decay that begins before the warm-up ends": (
        ["lr_schedule=wsd", "lr_schedule.warmup=15", "lr_schedule.decay_share=0.5"],
        2,
        ["lr_schedule.decay_share", "15 steps of warm-up"],
    ),
    "a learning rate of nought": (["optim.lr=0"], 2, ["optim.lr"]),
    "a sweep without -m": (["optim.lr=1e-3,1e-4"], 2, ["optim.lr", "-m"]),
    "an unfinished list": (["data.sources=[{name: a"], 2, ["data.sources"]),
    "a name that is a path": (["run.name=../x"], 2, ["run.name"]),
    "an unknown flag": (["--cgf", "job"], 2, ["--cgf", "--cfg"]),
    "CUDA where there is none": (["train.device=cuda"], 2, ["train.device", "cuda"]),
    "a checkpoint that is not there": (["checkpoint.resume=nowhere"], 3, ["nowhere", "no checkpoint"]),
    "data that is not there": (["data.sources=[{name: a, prefix: /no/where}]"], 3, ["/no/where"]),
    "a sequence longer than the data": (["train.seq_len=100000"], 3, ["100000", "train.seq_len"]),
    "a model with too few entries": (["model.vocab_size=50"], 3, ["50", "96"]),
    "a tokenizer that is not there": (["data.tokenizer=no.model"], 3, ["no.model"]),
}


@pytest.mark.parametrize("wrong, code, words", REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_invocation_is_refused_in_words(tiny, capsys, wrong, code, words):
    base = [o for o in tiny if "data.sources" not in o] if "data.sources" in wrong[0] else tiny
    wrong = [*base, *wrong]
    if any(o.startswith("train.tokens") for o in wrong):
        wrong = [o for o in wrong if o != "train.steps=20"]
    began = time.perf_counter()
    assert train.main(wrong) == code
    assert time.perf_counter() - began < 10
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(word in said for word in words), said


def damaged(tmp_path, tiny, damage):
    prefix = write_corpus(tmp_path / "broken", 20, seed=3)
    damage(prefix)
    kept = [o for o in tiny if "data.sources" not in o]
    return [*kept, f"data.sources=[{{name: b, prefix: '{prefix}'}}]"]


DAMAGES = {
    "a truncated .bin": lambda p: p.with_suffix(".bin").write_bytes(p.with_suffix(".bin").read_bytes()[:-10]),
    "an .idx of another file": lambda p: p.with_suffix(".idx").write_bytes(b"not an index at all, no"),
    "an empty .idx": lambda p: p.with_suffix(".idx").write_bytes(b""),
    "a missing .bin": lambda p: p.with_suffix(".bin").unlink(),
    "ids over the vocabulary": lambda p: np.full(p.with_suffix(".bin").stat().st_size // 2, 999, np.uint16).tofile(
        p.with_suffix(".bin")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_data_is_refused_with_its_file(tmp_path, tiny, capsys, damage):
    assert train.main(damaged(tmp_path, tiny, damage)) == 3
    said = capsys.readouterr().err
    assert "broken" in said and "Traceback" not in said


def test_one_id_over_the_vocabulary_is_refused_with_its_position_while_training(tmp_path, tiny, capsys):
    def one_bad_id(prefix):
        ids = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
        ids[777] = 999
        ids.tofile(prefix.with_suffix(".bin"))

    assert train.main([*damaged(tmp_path, tiny, one_bad_id), "train.steps=40"]) == 3
    assert "999" in capsys.readouterr().err


@pytest.mark.parametrize("held_out", [False, True])
def test_documents_of_one_token_are_refused_where_they_are_masked(tmp_path, tiny, capsys, corpus, held_out):
    with CorpusWriter(tmp_path / "ones", "uint16") as writer:
        for token in range(500):
            writer.add_document([token % 96])
        writer.finish(tokenizer="0" * 64, vocab_size=96, bytes_of_text=500)
    source = {"prefix": corpus, "validation": tmp_path / "ones"} if held_out else {"prefix": tmp_path / "ones"}
    named = ", ".join(f"{key}: '{path}'" for key, path in source.items())
    ones = [*(o for o in tiny if "data.sources" not in o), f"data.sources=[{{name: ones, {named}}}]"]
    assert train.main(ones) == 3
    assert "ones has nothing to learn: its 500 documents hold 500 tokens" in capsys.readouterr().err
    assert train.main([*ones, "data.document_mask=false", "train.stop_at=1"]) == 0


def test_a_secret_under_a_mistyped_key_is_not_shown(tiny, capsys):
    assert train.main([*tiny, "metrics.wandb_api_key=S3CR3T"]) == 2
    said = capsys.readouterr().err
    assert "wandb_api_key" in said and "S3CR3T" not in said


def test_many_mistakes_are_told_at_once(tiny, capsys):
    wrong = ["trian.steps=3", "optim.lr=-1", "model.layers=two", "train.micro_batch=3", "model=8bb"]
    assert train.main([*tiny, *wrong]) == 2
    said = capsys.readouterr().err
    assert all(o.split("=")[0] in said for o in wrong)


def test_a_folder_that_cannot_be_made_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train.main([*tiny, f"run.dir={tmp_path / 'file'}"]) == 2
    assert "must be a folder" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(tiny, capsys):
    from tests.test_train import run_of

    assert train.main([*tiny, "train.stop_at=3"]) == 0
    (run_of(tiny) / "checkpoints" / "step_00000003" / "tensors.safetensors").write_bytes(b"\0" * 100)
    assert train.main(tiny) == 3
    assert "tensors.safetensors" in capsys.readouterr().err


def test_the_command_line_itself_answers_without_a_traceback(launch):
    began = time.perf_counter()
    done = launch("train.stepss=3", "+x=1")
    assert time.perf_counter() - began < 10
    assert done.returncode == 2 and done.stdout == ""
    assert "train.steps" in done.stderr and "+x=1" in done.stderr and "Traceback" not in done.stderr
