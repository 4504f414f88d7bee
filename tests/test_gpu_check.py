"""The script that checks a GPU, tried on a CPU: what it reports, and that it fails where something is wrong."""

import json
import warnings
from unittest.mock import patch

import pytest
import torch

from benchmarks import gpu_check, gpu_kernels, gpu_sections
from benchmarks.gpu_check import SECTIONS, Outcome, Section, apart, main
from benchmarks.gpu_kernels import Case, cases, played_gather, played_ring, shared_error
from benchmarks.gpu_sections import Figure, Setting
from conf.compose import compose
from engine import Engine
from model import experts
from tests.model import flash_model

CPU = torch.device("cpu")
NEEDS_CUDA = {"ring", "syncs"}


@pytest.fixture(autouse=True)
def settings_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def report(tmp_path):
    """Exit code and report of sections run in this process."""

    def run(*names):
        file = tmp_path / "report.json"
        chosen = [word for name in names for word in ("--section", name)]
        code = main(["--here", "--quick", "--device", "cpu", "--json", str(file), *chosen])
        return code, json.loads(file.read_text())

    return run


def section(found, name):
    return next(each for each in found["sections"] if each["name"] == name)


def test_a_cpu_passes_all_that_it_can_run_and_is_told_what_needs_a_gpu(report):
    code, found = report()
    assert code == 0 and found["passed"] and found["quick"] and found["device"] == "cpu"
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["device"]
    assert {"cuda", "driver", "python", "transformer_engine"} <= found["environment"].keys()
    assert [each["name"] for each in found["sections"]] == [each.name for each in SECTIONS]
    for each in found["sections"]:
        if each["name"] in NEEDS_CUDA:
            assert (each["state"], each["reason"], each["figures"]) == ("skipped", "skipped: needs CUDA", [])
        else:
            assert each["state"] == "passed" and each["reason"] is None and each["figures"]
            assert all(figure["passed"] for figure in each["figures"])
    limits = {figure["name"]: figure["limit"] for figure in section(found, "parity")["figures"]}
    for (kind, precision), tolerance in gpu_sections.PARITY.items():
        assert limits[f"{kind} {precision}: largest difference of the loss"] == tolerance.loss
        assert limits[f"{kind} {precision}: largest difference of the norm"] == tolerance.norm
    assert {"eager: step", "eager: tokens/s", "eager: MFU"} <= {f["name"] for f in section(found, "speed")["figures"]}


def test_a_section_runs_in_a_process_of_its_own(tmp_path):
    file = tmp_path / "report.json"
    assert main(["--quick", "--device", "cpu", "--json", str(file), "--section", "checkpoint"]) == 0
    found = json.loads(file.read_text())
    assert section(found, "checkpoint")["state"] == "passed" and found["environment"]["torch"]
    rate = next(figure for figure in section(found, "checkpoint")["figures"] if figure["name"] == "rate")
    assert rate["value"] > 0 and rate["unit"] == "MB/s"


def test_a_hanging_section_is_ended_and_fails():
    outcome = apart(Section("experts", gpu_kernels.experts, timeout=0), Setting(CPU, quick=True))
    assert (outcome.state, outcome.reason) == ("FAILED", "it took longer than 0 s")


def test_a_tolerance_that_is_too_small_fails(report, monkeypatch):
    monkeypatch.setitem(gpu_kernels.ATTENTION, torch.bfloat16, 1e-6)
    code, found = report("attention")
    bad = {figure["name"] for figure in section(found, "attention")["figures"] if not figure["passed"]}
    assert code == 1 and not found["passed"] and section(found, "attention")["state"] == "FAILED"
    assert bad == {f"{name}, bf16: error" for name in cases(8)}


def test_a_wrong_gradient_fails(report, monkeypatch):
    right = experts._grouped_gradient
    monkeypatch.setattr(experts, "_grouped_gradient", lambda *given: 1.1 * right(*given))
    code, found = report("experts")
    bad = {figure["name"] for figure in section(found, "experts")["figures"] if not figure["passed"]}
    assert code == 1 and bad == {f"{name}, grouped: error" for name in ("even loads", "idle experts", "all to one")}


def test_an_error_in_one_section_is_reported_and_the_others_run(report, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(gpu_kernels, "pass_of", broken)
    code, found = report("experts", "checkpoint")
    assert code == 1 and section(found, "checkpoint")["state"] == "passed"
    assert section(found, "experts")["state"] == "FAILED"
    assert "RuntimeError" in section(found, "experts")["reason"]
    assert "no kernel image is available" in section(found, "experts")["reason"]


def test_a_model_that_learns_otherwise_on_the_device_fails(report, monkeypatch):
    curve = gpu_sections.curve

    def other(config, batches, device):
        found = curve(config, batches, device)
        worse = tuple(1.01 * loss for loss in found.losses)
        return gpu_sections.Curve(worse, found.norms) if config.precision.name == "bf16" else found

    monkeypatch.setattr(gpu_sections, "curve", other)
    code, found = report("parity")
    bad = {figure["name"] for figure in section(found, "parity")["figures"] if not figure["passed"]}
    assert code == 1 and bad == {f"{kind} bf16: largest difference of the loss" for kind in ("dense", "mixture")}


def test_what_is_no_number_fails_and_stays_json():
    lost = Outcome("speed", "FAILED", figures=[Figure("loss", float("nan")), Figure("step", 1.0, "ms", 2.0)])
    written = json.loads(json.dumps(lost.to_json(), allow_nan=False))
    assert [figure["passed"] for figure in written["figures"]] == [False, True]
    assert [figure.passed for figure in Outcome.from_json(written).figures] == [False, True]
    assert Figure("MFU", 0.4, "", 0.2, ">=").passed and not Figure("MFU", 0.1, "", 0.2, ">=").passed


@pytest.fixture
def flash():
    """The flash kernel's model in the place of the kernel."""
    with flash_model.instead(), patch.object(gpu_kernels, "causal_segments", flash_model._Segments.apply):
        yield


@pytest.mark.parametrize("name", cases(8))
def test_the_played_ranks_are_the_whole_attention(flash, name):
    small = cases(16)[name]
    for ranks in (2, 4):
        for play in (played_ring, played_gather):
            assert shared_error(small, ranks, play, torch.float64, CPU) < 1e-12


def test_a_wrong_merge_is_seen_in_the_ring(flash, monkeypatch):
    monkeypatch.setattr("model.ring_attention.merge", lambda out, lse, part, part_lse: out.copy_(part))
    assert not shared_error(Case(32), 2, played_ring, torch.float64, CPU) < 0.1


def test_the_ring_section_names_every_case(flash):
    with patch.object(gpu_kernels, "shared_error", lambda *_: 0.0):
        names = [figure.name for figure in gpu_kernels.ring(Setting(CPU, quick=True))]
    assert len(set(names)) == 2 * 2 * len(cases(8))


@pytest.mark.filterwarnings("ignore:called a synchronizing")  # of the steps before those that are watched
def test_a_wait_for_the_device_is_found_at_its_line_in_the_project(monkeypatch):
    """As PyTorch warns of it, from inside a step."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    begin = Engine._begin

    def waiting(*given):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return begin(*given)

    monkeypatch.setattr(Engine, "_begin", waiting)
    figures = {figure.name: figure for figure in gpu_sections.host_syncs(Setting(CPU, quick=True))}
    total = figures.pop("dense: host syncs a step")
    assert total.value == 1.0 and not total.passed
    assert any(name.startswith("dense: of these at tests/test_gpu_check.py:") for name in figures)


def test_the_shape_is_that_of_the_configuration():
    assert compose(["model=1b"]).model == gpu_sections.ONE_B


def test_layers_are_left_out_until_the_rest_fits():
    needs = gpu_sections.bytes_needed(gpu_sections.ONE_B, 4096)
    assert 25e9 < needs < 40e9
    assert gpu_sections.fitting(gpu_sections.ONE_B, 4096, needs) == gpu_sections.ONE_B
    fewer = gpu_sections.fitting(gpu_sections.ONE_B, 4096, 0.7 * needs)
    assert 1 < fewer.layers < 16 and gpu_sections.bytes_needed(fewer, 4096) <= 0.7 * needs
    assert gpu_sections.fitting(gpu_sections.ONE_B, 4096, 0.0).layers == 1


def test_memory_is_told_by_kind(monkeypatch):
    setting = Setting(CPU, quick=True)
    config = gpu_sections.speed_config(setting)
    allocated = iter([14_000_000, 16_000_000])  # before the step, and at the end of its backward pass
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 24_000_000)
    with gpu_sections.trial_corpus(config, 1) as batches:
        engine = gpu_sections.made(config, CPU)
        told = {f.name.removeprefix("eager: "): f for f in gpu_sections._memory(engine, batches[0], "eager")}
    assert told["weights and optimizer"].value == pytest.approx(0.014)
    assert told["gradients at the end of the backward pass"].value == pytest.approx(0.002)
    assert told["peak of activations and gradients"].value == pytest.approx(0.006)
    assert told["reserved"].value == pytest.approx(0.024)
    assert not told["weights and optimizer a parameter"].passed  # 14 MB for 0.36 M parameters


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    assert main(["--device", "cpu", "--json", str(tmp_path / "none" / "report.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused_in_words(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
