"""A tokenizer is trained on a sample that the documents and the seed decide, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.texts.origin import Skipped
from data.tokenizers.tokenizer import load_tokenizer
from data.train_tokenizer import draw_sample, main
from errors import DataRefused
from tests.data.listed import documents, origin

TEXTS = [f"def function_{n}(value):\n    return value * {n} + other({n})\n" * (1 + n % 5) for n in range(300)]


def quiet(line: str) -> None:
    """Says nothing."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A jsonl file."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    return path


def run(texts: Path, output: Path, *more: str) -> int:
    """The command's exit code."""
    return main(["--input", str(texts), "--column", "content", "--vocab-size", "400", "--output", str(output), *more])


def test_the_sample_does_not_depend_on_how_the_texts_are_cut() -> None:
    samples = [draw_sample(origin(documents(TEXTS), parts), 5000, 3, quiet) for parts in (1, 7)]
    assert samples[0] == samples[1]
    assert samples[0].documents == 300
    size = sum(len(text) for text in (*samples[0].training, *samples[0].held_back))
    assert 4000 < size <= 5000


def test_another_seed_draws_other_texts_and_all_are_drawn_when_they_fit() -> None:
    whole = origin(documents(TEXTS))
    first, other = (draw_sample(whole, 5000, seed, quiet) for seed in (0, 1))
    assert set(first.training) != set(other.training)
    everything = draw_sample(whole, 10**9, 0, quiet)
    assert sorted((*everything.training, *everything.held_back)) == sorted(TEXTS)
    assert len(everything.held_back) == 3


def test_a_text_that_is_larger_than_the_limit_is_still_taken_and_none_is_refused() -> None:
    sample = draw_sample(origin(documents(["only one text"])), 3, 0, quiet)
    assert (sample.training, sample.held_back) == (["only one text"], [])
    with pytest.raises(DataRefused, match="no text to train"):
        draw_sample(origin([Skipped("x", "empty")]), 100, 0, quiet)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_command_gives_the_same_file_and_tells_how_good_it_is(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    outputs = [tmp_path / "new" / "a.model", tmp_path / "b.model"]
    assert [run(texts, output, "--kind", kind, "--max-bytes", "2e4") for output in outputs] == [0, 0]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    tokenizer = load_tokenizer(outputs[0])
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(f"{TEXTS[7]}\u00e9\u4e2d")) == f"{TEXTS[7]}\u00e9\u4e2d"
    printed = capsys.readouterr()
    assert tokenizer.fingerprint in printed.out and "bytes a token on held-back text" in printed.out
    assert f"400 entries ({kind})" in printed.err


def test_the_two_kinds_are_not_one(texts: Path, tmp_path: Path) -> None:
    run(texts, tmp_path / "bpe.model")
    run(texts, tmp_path / "unigram.model", "--kind", "unigram")
    assert (tmp_path / "bpe.model").read_bytes() != (tmp_path / "unigram.model").read_bytes()


def test_a_tokenizer_that_is_there_is_kept_unless_told_otherwise(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.model").write_bytes(b"old")
    assert run(texts, tmp_path / "old.model") == 3
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "old.model").read_bytes() == b"old"
    assert run(texts, tmp_path / "old.model", "--overwrite") == 0
    assert load_tokenizer(tmp_path / "old.model").vocab_size == 400


def test_what_cannot_be_done_is_refused_in_words(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(texts, texts / "under_a_file.model") == 3
    assert "nothing can be written to" in capsys.readouterr().err
    assert run(tmp_path / "none.jsonl", tmp_path / "x.model") == 3
    assert "none.jsonl" in capsys.readouterr().err
    assert run(texts, tmp_path / "x.model", "--vocab-size", "100") == 3
    assert "--vocab-size" in capsys.readouterr().err
    assert not (tmp_path / "x.model").exists()


@pytest.mark.parametrize(
    "flags",
    [["--max-bytes", "0"], ["--vocab-size", "many"], ["--kind", "words"], ["--subset", "en"], ["--streaming"],
     ["--corpus", "stdlib"], ["--max-bytes", "nan"]],
)  # fmt: skip
def test_wrong_flags_end_with_code_2(texts: Path, tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(texts, tmp_path / "x.model", *flags)
    assert ended.value.code == 2


def test_format_goes_with_files(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--corpus", "stdlib", "--format", "text", "--output", str(tmp_path / "x.model")])
    assert ended.value.code == 2
