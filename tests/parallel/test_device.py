"""Automatic choices are measured, safe and reasoned."""

import platform
import subprocess
import sys

import pytest
import torch

from parallel import device as device_module
from parallel.device import (
    Choice,
    choose_matmul,
    choose_threads,
    half_products,
    measure_peak,
    published_peak,
    set_up_machine,
)
from parallel.precision import PrecisionConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_are_put_back():
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_num_threads(before[1])


def test_measuring_leaves_the_process_as_it_was():
    before = torch.get_float32_matmul_precision()
    choose_matmul(PrecisionConfig("fp32"), CPU)
    assert torch.get_float32_matmul_precision() == before


def test_a_setting_that_rounds_is_never_chosen_however_fast(monkeypatch):
    real = torch.nn.functional.linear

    def rounding(x, w):
        if torch.get_float32_matmul_precision() == "highest":
            return real(x, w)
        return real(x.bfloat16(), w.bfloat16()).float()

    monkeypatch.setattr(torch.nn.functional, "linear", rounding)
    times = iter([1.0, 0.1, 0.1])
    monkeypatch.setattr(device_module, "_seconds", lambda work, times_=7: next(times))
    assert choose_matmul(PrecisionConfig("fp32"), CPU).value == "highest"


def test_a_faster_setting_that_is_true_fp32_is_chosen_with_its_reason(monkeypatch):
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: real(x.double(), w.double()).float())
    times = iter([1.0, 0.9, 0.5])
    monkeypatch.setattr(device_module, "_seconds", lambda work, times_=7: next(times))
    choice = choose_matmul(PrecisionConfig("fp32"), CPU)
    assert choice.value == "medium" and "2.0x faster" in choice.reason


@pytest.mark.parametrize("asked", ["highest", "high", "medium"])
def test_an_explicit_setting_is_taken(asked):
    assert choose_matmul(PrecisionConfig("fp32", asked), CPU).value == asked


@pytest.mark.parametrize("seconds, words", [
    ((1.0, 0.25), "4.0x the speed of fp32 here"),
    ((1.0, 3.0), "3.0x slower than fp32 on this CPU: precision=fp32 trains faster"),
])  # fmt: skip
def test_16_bit_products_of_a_cpu_are_measured_beside_fp32(monkeypatch, seconds, words):
    times = iter(seconds)
    monkeypatch.setattr(device_module, "_fastest_true_fp32", lambda: Choice("medium", "said so"))
    settings: list[str] = []

    def timed(work):
        settings.append(torch.get_float32_matmul_precision())
        return next(times)

    monkeypatch.setattr(device_module, "_seconds", timed)
    assert half_products(torch.bfloat16, CPU).reason == words
    assert settings[0] == "medium" and torch.get_float32_matmul_precision() == "highest"


def test_16_bit_products_of_cuda_are_summed_in_fp32():
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    try:
        half_products(torch.bfloat16, torch.device("cuda"))
        assert not flags.allow_bf16_reduced_precision_reduction and not flags.allow_fp16_reduced_precision_reduction
    finally:
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before


def test_threads_are_the_asked_ones_or_the_usable_cores():
    assert choose_threads(3).value == "3"
    assert int(choose_threads(None).value) >= 1


@pytest.mark.parametrize("name, compute, master", [
    ("fp64", torch.float64, torch.float64),
    ("fp32", torch.float32, torch.float32),
    ("bf16", torch.bfloat16, torch.float32),
])  # fmt: skip
def test_a_machine_has_its_dtypes_and_says_each_choice(name, compute, master):
    said: list[str] = []
    machine = set_up_machine("cpu", 0, 1, 1, PrecisionConfig(name), None, None, said.append)
    assert (machine.compute_dtype, machine.master_dtype) == (compute, master)
    assert machine.peak > 1e8
    assert len(said) == 4 and any("train.device=cpu" in line for line in said) and "measured" in said[-1]


def test_a_resumed_run_keeps_its_fp32_products_where_they_are_still_true(monkeypatch):
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: real(x.double(), w.double()).float())
    assert choose_matmul(PrecisionConfig("fp32"), CPU, "medium").value == "medium"
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: real(x.bfloat16(), w.bfloat16()).float())
    choice = choose_matmul(PrecisionConfig("fp32"), CPU, "medium")
    assert choice.value == "highest" and "began with medium" in choice.reason
    assert choose_matmul(PrecisionConfig("fp32", "highest"), CPU, "medium").value == "highest"
    assert choose_matmul(PrecisionConfig("fp32"), torch.device("cuda"), "medium").value == "highest"


def test_a_given_peak_counts():
    said: list[str] = []
    assert set_up_machine("cpu", 0, 1, 1, PrecisionConfig("fp64"), 2.5, None, said.append).peak == 2.5e12


def test_the_peak_is_measured_in_a_second():
    assert measure_peak(torch.float32, CPU) > 1e8


@pytest.mark.parametrize(
    "name, precision, tflops",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H200", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5), ("NVIDIA B200", "bf16", 2250),
    ],
)  # fmt: skip
def test_peaks_are_the_published_dense_ones(name, precision, tflops):
    assert published_peak(name, precision) == tflops * 1e12


def test_an_unknown_device_has_no_published_peak():
    assert published_peak("Riva TNT2", "bf16") is None


def test_tf32_products_are_measured_against_their_own_peak():
    assert published_peak("NVIDIA H100 80GB HBM3", "fp32", "high") == 494e12


FAULTS = """
import resource, sys, torch
from parallel.device import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
def work():
    for _ in range(20):
        torch.ones(16_000_000)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told to keep memory")
def test_kept_memory_is_not_faulted_in_again():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 1000 < 20 * 16_000_000 * 4 / 4096 / 2 < faults("leave")
