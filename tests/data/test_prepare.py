"""The command python -m data.prepare, as people use it: flags, refusals, kills."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece

from data import prepare as command
from tests.conftest import ROOT

COMMAND = [sys.executable, "-m", "data.prepare"]


def write_jsonl(folder: Path, shards: int, lines: int, words: int = 60) -> str:
    """Files of documents of some `words` words each; their pattern."""
    folder.mkdir()
    for shard in range(shards):
        rng = random.Random(shard)
        texts = (" ".join(str(rng.randrange(10**6)) for _ in range(rng.randrange(1, 2 * words))) for _ in range(lines))
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder / "*.jsonl")


def arguments(pattern: str, output: Path, workers: int = 2) -> list[str]:
    """Everything at once: two workers, a split, no duplicates."""
    return [
        "--input", pattern, "--tokenizer", "bytes", "--output", f"{output}/train", "--validation", f"{output}/held",
        "--held-out", "0.1", "--deduplicate", "--workers", str(workers),
    ]  # fmt: skip


def result(output: Path) -> dict[str, bytes]:
    """Every file that is left, but the report (it tells times) and the lock."""
    return {
        path.name: path.read_bytes()
        for path in output.iterdir()
        if path.suffix != ".lock" and "report" not in path.name
    }


def run(pattern: str, output: Path, workers: int = 2) -> subprocess.CompletedProcess[str]:
    given = [*COMMAND, *arguments(pattern, output, workers)]
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def killed_and_finished(pattern: str, output: Path, kills: int, seconds: float, rng: random.Random) -> None:
    """Kills the command `kills` times at random moments within `seconds` of its start, the number of workers changing;
    then lets it finish. One that was done before its moment begins again from nothing."""
    killed = 0
    for number in range(20 * kills):
        process = subprocess.Popen(
            [*COMMAND, *arguments(pattern, output, 1 + number % 3)], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        if process.wait() == 0:
            shutil.rmtree(output)
            continue
        killed += 1
        if killed == kills:
            break
    assert killed == kills
    finished = run(pattern, output)
    assert finished.returncode == 0, finished.stderr


def check_kills(tmp_path: Path, kills: int, shards: int, lines: int) -> None:
    pattern = write_jsonl(tmp_path / "texts", shards, lines)
    began = time.monotonic()
    assert run(pattern, tmp_path / "whole").returncode == 0
    seconds = time.monotonic() - began
    seed = time.time_ns()
    killed_and_finished(pattern, tmp_path / "killed", kills, seconds, random.Random(seed))
    assert result(tmp_path / "killed") == result(tmp_path / "whole"), f"another result with the moments of seed {seed}"


def test_killed_at_random_moments_it_goes_on_and_makes_the_same_files(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=3, shards=6, lines=1500)


@pytest.mark.soak
@pytest.mark.parametrize("attempt", range(5))
def test_killed_ten_times_it_goes_on_and_makes_the_same_files(tmp_path: Path, attempt: int) -> None:
    check_kills(tmp_path, kills=10, shards=20, lines=5000)


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    pattern = write_jsonl(tmp_path / "texts", 2, 400)
    given = [*COMMAND, *arguments(pattern, tmp_path / "out", 1)]
    both = [subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert ["is done already" in words for words in said].count(True) == 1


def test_stopped_by_a_signal_it_says_that_nothing_is_lost(tmp_path: Path) -> None:
    pattern = write_jsonl(tmp_path / "texts", 8, 2500)
    process = subprocess.Popen(
        [*COMMAND, *arguments(pattern, tmp_path / "out")], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("out/train.work/*.json")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert "the same command goes on from here" in process.communicate(timeout=60)[1]
    assert process.returncode == 75
    assert run(pattern, tmp_path / "out").returncode == 0


def test_it_prints_a_report_and_the_line_that_trains_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = write_jsonl(tmp_path / "texts", 2, 50)
    assert command.main(arguments(pattern, tmp_path / "out", workers=1)) == 0
    printed = capsys.readouterr().out
    assert "training    " in printed
    assert "duplicates  0 dropped" in printed
    assert (
        f"python train.py data=indexed 'data.sources=[{{name: train, prefix: {tmp_path}/out/train, validation: "
        f"{tmp_path}/out/held}}]' data.tokenizer=bytes" in printed
    )
    assert command.main(arguments(pattern, tmp_path / "out", workers=1)) == 0
    assert "is done already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--input", "MISSING/*.jsonl"], "matches no file"),
        (["--column", "content"], "content"),
        (["--tokenizer", "MISSING.model"], "cannot be read"),
        (["--output", "/proc/nowhere/train"], "cannot be written"),
        (["--min-bytes", "1000000"], "there is no text to prepare (too short: 100"),
    ],
)
def test_what_cannot_work_is_refused_in_words_with_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    pattern = write_jsonl(tmp_path / "texts", 2, 50)
    given = ["--input", pattern, "--tokenizer", "bytes", "--output", str(tmp_path / "out"), "--workers", "1", *changes]
    assert command.main(given) == 3
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("out.bin"))


def test_a_file_that_cannot_be_read_is_refused_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = write_jsonl(tmp_path / "texts", 2, 50)
    (tmp_path / "texts" / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 no gzip")
    given = [
        "--input",
        str(tmp_path / "texts"),
        "--tokenizer",
        "bytes",
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert pattern
    assert command.main(given) == 3
    said = capsys.readouterr().err
    assert "cut.jsonl.gz" in said
    assert "--allow-unreadable" in said
    assert command.main([*given, "--allow-unreadable"]) == 0
    assert "unreadable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "one of the arguments --input --dataset --corpus is required"),
        (["--corpus", "stdlib", "--subset", "x"], "--subset is for --dataset"),
        (["--corpus", "stdlib", "--streaming"], "--streaming is for --dataset"),
        (["--corpus", "stdlib", "--format", "text"], "--format is for --input"),
        (["--corpus", "stdlib", "--held-out", "0.1"], "--held-out needs --validation"),
    ],
)
def test_flags_that_do_not_go_together_end_with_code_2(
    capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main([*given, "--tokenizer", "bytes", "--output", "never"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_a_value_out_of_range_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--corpus", "stdlib", "--tokenizer", "bytes", "--output", str(tmp_path / "out"), "--workers", "0"]
    assert command.main(given) == 2
    assert "workers is 0, but must be at least 1" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert "python -m data.prepare --corpus stdlib --tokenizer bytes --output" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_is_really_full_is_refused_and_gone_on_with_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern, disk = write_jsonl(tmp_path / "texts", 2, 2000), tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("no disk may be mounted here")
    try:
        assert command.main(arguments(pattern, disk, workers=1)) == 3
        assert "(No space left on device): make room, then start the same command again" in capsys.readouterr().err
        assert not list(disk.glob("*.bin"))
        subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
        assert command.main(arguments(pattern, disk, workers=1)) == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern, model = write_jsonl(tmp_path / "texts", 1, 20), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["0 1 2 3 4", "5 6 7 8 9"]), model_writer=model, model_type="char", vocab_size=13,
        hard_vocab_limit=False, eos_id=-1, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "no_end.model").write_bytes(model.getvalue())
    given = ["--input", pattern, "--tokenizer", str(tmp_path / "no_end.model"), "--output", str(tmp_path / "out")]
    assert command.main(given) == 3
    assert "no end-of-sequence token" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_repeated_input_adds_to_the_first(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    given = ["--input", str(tmp_path / "a.txt"), "--input", str(tmp_path / "b.txt")]
    assert command.main([*given, "--tokenizer", "bytes", "--output", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["documents"] == 2
