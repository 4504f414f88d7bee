"""Runs over several sources: proportions, places through a change of mixture, growing batches, steps passed over."""

import json

import pytest

import train
from checkpoint.folder import newest
from checkpoint.run_state import read_state
from tests.conftest import losses, records, validations, write_corpus
from tests.test_layouts_end_to_end import SHAPE, close, torchrun
from tests.test_train import run_of


@pytest.fixture
def mixed(tiny, tmp_path):
    """Overrides of a tiny run over two sources of 3,700 and 1,900 tokens, in the weights 3 and 1."""
    write_corpus(tmp_path / "prose", 30, seed=5)
    write_corpus(tmp_path / "held", 12, seed=6)
    first = next(o for o in tiny if o.startswith("data.sources"))
    prose = f"{{name: prose, prefix: '{tmp_path / 'prose'}', validation: '{tmp_path / 'held'}', weight: 1}}]"
    return [*(o for o in tiny if o != first), first[:-2] + ", weight: 3}, " + prose]


def weights(mixed, small, prose):
    """The same run with other weights."""
    changed = next(o for o in mixed if o.startswith("data.sources"))
    other = changed.replace("weight: 3}", f"weight: {small}.0}}").replace("weight: 1}", f"weight: {prose}.0}}")
    return [*(o for o in mixed if o != changed), other]


def epochs(run):
    """Of each source by step."""
    return {r["step"]: r["epochs"] for r in records(run) if "epochs" in r}


def state(run):
    found = newest(run / "checkpoints")
    assert found is not None
    return read_state(found)


def test_a_mixture_trains_and_tells_of_each_source(mixed, capsys):
    assert train.main(mixed) == 0
    said, run = capsys.readouterr().out, run_of(mixed)
    assert "mixture from the beginning: small 0.75, prose 0.25" in said
    held = [r for r in records(run) if r.get("event") == "validation"][-1]["sources"]
    assert held.keys() == {"small", "prose"}
    for told in held.values():  # 200 bytes a document, as the corpus was written
        assert told["bits_per_byte"] < told["loss"] / 0.69
    assert f"small {held['small']['loss']:.4f} ({held['small']['bits_per_byte']:.4f} bits/byte)" in said
    read = {name: share * {"small": 114, "prose": 57}[name] for name, share in epochs(run)[20].items()}
    assert read["small"] == pytest.approx(120, rel=0.05) and read["prose"] == pytest.approx(40, rel=0.05)


def test_a_mixture_stopped_and_led_on_is_bitwise_an_undisturbed_one(mixed):
    phased = [*mixed, "data.phases=[{tokens: 2000}, {weights: {prose: 1}}]"]
    assert train.main([*phased, "run.name=whole"]) == 0
    for stop_at in (3, 8, 13, 20):
        assert train.main([*phased, f"train.stop_at={stop_at}"]) == 0
    assert losses(run_of(mixed)) == losses(run_of(mixed, "whole"))
    assert validations(run_of(mixed)).items() >= validations(run_of(mixed, "whole")).items()
    small = [each["small"] for each in epochs(run_of(mixed)).values()]
    assert small[6] < small[7] == small[-1]  # 2,000 tokens are 62 samples, within the eighth step


def test_another_mixture_begins_a_phase_and_each_source_goes_on_where_it_stood(mixed, capsys):
    assert train.main([*mixed, "train.stop_at=10"]) == 0
    changed = weights(mixed, 1, 3)
    assert train.main(changed) == 2  # not in silence
    assert "data.sources" in capsys.readouterr().err
    assert train.main([*changed, "checkpoint.allow=[data.sources]"]) == 0
    assert "mixture from sample 80 on: small 0.25, prose 0.75" in capsys.readouterr().out
    found = state(run_of(mixed))
    assert [(each["first"], each["counts"]) for each in found.phases] == [
        (0, {"small": 3, "prose": 1}), (80, {"small": 1, "prose": 3})
    ]  # fmt: skip
    ten, eleven, last = (epochs(run_of(mixed))[step] for step in (10, 11, 20))
    assert 0 < eleven["prose"] - ten["prose"] == pytest.approx(6 * ten["prose"] / 20)
    assert last["small"] / ten["small"] == pytest.approx((60 + 20) / 60)


def test_a_source_may_join_and_leave_and_is_known_again(mixed, tiny, tmp_path, capsys):
    assert train.main([*tiny, "train.stop_at=5"]) == 0
    allow = "checkpoint.allow=[data.sources]"
    assert train.main([*mixed, allow, "train.stop_at=9"]) == 0
    assert train.main([*tiny, allow, "train.stop_at=12"]) == 0
    assert state(run_of(mixed)).data.keys() == {"small", "prose"}
    write_corpus(tmp_path / "prose", 30, seed=8)  # another text under the name of the one that left
    capsys.readouterr()
    assert train.main([*mixed, allow]) == 3
    assert "source prose was trained on other data" in capsys.readouterr().err
    write_corpus(tmp_path / "prose", 30, seed=5)
    assert train.main([*mixed, allow]) == 0
    assert [each["first"] for each in state(run_of(mixed)).phases] == [0, 40, 72, 96]


def test_longer_samples_go_on_with_each_sources_next_epoch(mixed, capsys):
    assert train.main([*mixed, "train.stop_at=10"]) == 0
    longer = [*mixed, "train.seq_len=64", "checkpoint.allow=[train.*]"]
    assert train.main([o for o in longer if "train.steps" not in o] + ["train.tokens=9000"]) == 2
    assert "say where it ends in steps" in capsys.readouterr().err
    assert train.main(longer) == 0
    found = epochs(run_of(mixed))
    assert found[10]["small"] < 1 < found[11]["small"] and found[11]["prose"] > 1
    last = [r for r in records(run_of(mixed)) if "event" not in r][-1]
    assert (last["samples"], last["tokens"]) == (160, 80 * 32 + 80 * 64)


def test_a_source_that_is_read_too_often_is_told_before_it_is(mixed, capsys):
    assert train.main([*mixed, "data.max_epochs=0.5", "train.stop_at=1"]) == 0
    assert "will have been read" not in capsys.readouterr().out
    assert train.main([*mixed, "data.max_epochs=0.9", "run.name=other"]) == 0
    said = capsys.readouterr().out
    assert "warning: source small will have been read 1.0" in said and "source prose will" not in said


def test_a_growing_batch_goes_on_after_a_stop_bitwise(tiny, capsys):
    ramp = [*tiny, "train.batch_ramp=[{tokens: 600, global_batch: 4}, {tokens: 200, global_batch: 4}]"]
    assert train.main([*ramp, "run.name=whole"]) == 0
    for stop_at in (2, 6, 20):
        assert train.main([*ramp, f"train.stop_at={stop_at}"]) == 0
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))
    made = [r for r in records(run_of(tiny)) if "event" not in r]
    assert [r["samples"] for r in made][:9] == [4, 8, 12, 16, 20, 24, 28, 36, 44]
    capsys.readouterr()
    assert train.main([*ramp, "run.name=by_tokens", "train.steps=null", "train.tokens=1000"]) == 0
    assert "done at step 7 of 7" in capsys.readouterr().out  # 28 samples of 31


def test_steps_are_passed_over_and_their_samples_count(tiny):
    skips = "train.skip_steps=[{first: 8, last: 9}, {first: 20}]"
    assert train.main([*tiny, "train.stop_at=7"]) == 0
    assert train.main([*tiny, skips]) == 0
    run = run_of(tiny)
    made = {r["step"]: r for r in records(run) if "event" not in r}
    assert 8 not in made and 9 not in made and 20 not in made
    assert made[10]["samples"] == 80
    told = [r for r in records(run) if r.get("event") == "skip"]
    assert [(r["step"], r["samples"]) for r in told] == [(8, [56, 64]), (9, [64, 72]), (20, [152, 160])]
    assert validations(run).keys() == {7, 14, 20} and state(run).step == 20 and state(run).updates == 17
    assert json.loads((run / "status.json").read_text())["state"] == "done"


@pytest.mark.parametrize("ranks", [(4,), *(pytest.param(r, marks=pytest.mark.soak) for r in ((2, 4), (4, 1, 2)))])
def test_a_mixture_goes_on_with_any_number_of_ranks(mixed, ranks):
    wide = [
        *(o for o in mixed if "micro_batch" not in o),
        *SHAPE,
        "data.phases=[{tokens: 5000}, {weights: {prose: 1}}]",
    ]
    assert train.main([*wide, "run.name=whole"]) == 0
    assert train.main([*wide, "train.stop_at=6"]) == 0
    for count, stop_at in zip(ranks, [20] if len(ranks) == 1 else (12, 20, 20), strict=False):
        done = torchrun(count, *wide, f"train.stop_at={stop_at}")
        assert done.returncode == 0, done.stderr
    close(run_of(wide), run_of(wide, "whole"), 1e-5)


def test_a_run_goes_back_once_and_the_later_checkpoints_are_set_aside(tiny, capsys):
    keep = [*tiny, "checkpoint.keep=0"]
    assert train.main(keep) == 0
    back = [
        *keep,
        "train.skip_steps=[{first: 8, last: 9}]",
        f"checkpoint.resume={run_of(tiny)}/checkpoints/step_00000006",
    ]
    assert train.main([*back, "train.stop_at=10"]) == 0
    assert "going back to step 6: a later checkpoint is now" in capsys.readouterr().out
    folder = run_of(tiny) / "checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "set_aside_step_00000012.1", "set_aside_step_00000018.1", "set_aside_step_00000020.1",
        "step_00000006", "step_00000010",
    ]  # fmt: skip
    assert train.main(back) == 0  # not back again
    assert "resuming from" in (said := capsys.readouterr().out) and "step_00000010 at step 10" in said
    assert state(run_of(tiny)).updates == 18 and state(run_of(tiny)).rewound == [6]


def test_steps_that_are_done_cannot_be_passed_over_any_more(tiny, capsys):
    assert train.main([*tiny, "train.stop_at=7"]) == 0
    assert train.main([*tiny, "train.skip_steps=[{first: 5}]", "train.stop_at=8"]) == 0
    assert "warning: train.skip_steps names steps up to 7, which are done" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["train.global_batch=16", "train.batch_ramp=[{tokens: 99, global_batch: 4}]"])
def test_another_batch_does_not_change_a_length_in_tokens_in_silence(tiny, capsys, change):
    by_tokens = [*(o for o in tiny if "train.steps" not in o), "train.tokens=5120"]
    assert train.main([*by_tokens, "train.stop_at=10"]) == 0
    assert train.main([*by_tokens, change, "checkpoint.allow=[train.*]"]) == 2
    assert "say where it ends in steps, train.steps=N" in capsys.readouterr().err


def test_rates_are_of_what_was_trained(tiny):
    often = [*tiny, "metrics.every=10", "train.skip_steps=[{first: 11, last: 19}]"]
    assert train.main(often) == 0
    ten, twenty = (r for r in records(run_of(tiny)) if "event" not in r)
    for each, steps in ((ten, 10), (twenty, 1)):
        working = steps * (each["step_time"] - each["time"]["evaluation"] - each["time"]["checkpoint"])
        assert each["tokens_per_s"] == pytest.approx(steps * 256 / working)


def test_texts_that_join_a_run_are_encoded_by_the_tokenizer_it_began_with(tiny, tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(40):
            words = (f"{name}{chr(97 + (number * at) % 26)}{at % 19}{chr(97 + at % 26)}" for at in range(150))
            text = f"The {name} text says " + " ".join(words)
            (tmp_path / name / f"{number}.txt").write_text(text)
    one, two = (f"{{name: {name}, input: '{tmp_path / name}/*.txt'}}" for name in ("one", "two"))
    plain = [o for o in tiny if not o.startswith("data")]
    texts = [*plain, f"data.cache={tmp_path / 'cache'}", "data.vocab_size=512", "data.held_out=0.1", "data.workers=1"]
    assert train.main([*texts, f"data.sources=[{one}]", "train.stop_at=4"]) == 0
    began = state(run_of(tiny)).tokenizer_fingerprint
    assert train.main([*texts, f"data.sources=[{one}, {two}]", "checkpoint.allow=[data.sources]"]) == 0
    assert state(run_of(tiny)).tokenizer_fingerprint == began
    assert len(list((tmp_path / "cache").glob("tokenizer-*"))) == 1
    capsys.readouterr()
    other = [*texts, f"data.sources=[{two}]", "data.tokenizer=bytes", "train.steps=30"]
    assert train.main([*other, "checkpoint.allow=[data.*, train.steps]"]) == 3
    assert "the run began with a tokenizer of SHA-256" in capsys.readouterr().err
