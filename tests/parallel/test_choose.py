"""Who makes FP8 products, on which GPUs and in which runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from errors import ConfigRefused
from parallel.fp8.choose import choose_backend, with_backend
from parallel.precision import FP8Config, PrecisionConfig
from tests.parallel.te_fake import World, install
from tests.parallel.te_sources import folder


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A stand-in for Transformer Engine, which can be imported."""
    return install(monkeypatch)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str = "12.9") -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return torch.device("cuda", 0)


CHOICES = [
    # precision, capability, CUDA, whether Transformer Engine makes the products, part of the reason
    ("fp8_delayed", (8, 9), "12.9", True, "a GPU"),
    ("fp8_delayed", (8, 0), "12.9", False, "at least 8.9, and 8.0"),
    ("fp8_current", (9, 0), "12.9", True, "a GPU"),
    ("fp8_block", (8, 9), "12.9", False, "at least 9.0"),
    ("fp8_block", (9, 0), "12.8", False, "CUDA 12.9"),
    ("fp8_block", (9, 0), "13.0", True, "a GPU"),
    ("mxfp8", (9, 0), "12.9", False, "at least 10.0"),
    ("mxfp8", (10, 0), "12.9", True, "a GPU"),
    ("mxfp8", (12, 0), "12.9", False, "below 12.0"),
]


@pytest.mark.parametrize(("name", "capability", "cuda", "able", "reason"), CHOICES)
def test_the_device_decides_and_te_is_refused_where_it_cannot_work(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], cuda: str, able: bool,
    reason: str,
) -> None:  # fmt: skip
    device = gpu(monkeypatch, capability, cuda)
    config = PrecisionConfig(name)  # type: ignore[arg-type]
    choice = choose_backend(config, device)
    assert choice.value == ("te" if able else "emulate")
    assert reason in choice.reason
    asked = replace(config, fp8=FP8Config("te"))
    if able:
        assert choose_backend(asked, device).value == "te"
    else:
        with pytest.raises(ConfigRefused, match=r"precision\.fp8\.backend=te\n     rule: .*\n     fix: "):
            choose_backend(asked, device)


def test_a_cpu_emulates_and_says_so() -> None:
    choice = choose_backend(PrecisionConfig("fp8_delayed"), torch.device("cpu"))
    assert choice.value == "emulate"
    assert "no CUDA device" in choice.reason
    assert with_backend(PrecisionConfig("fp8_delayed"), choice).fp8.backend == "emulate"
    with pytest.raises(ConfigRefused, match="no CUDA device"):
        choose_backend(PrecisionConfig("fp8_delayed", fp8=FP8Config("te")), torch.device("cpu"))


def test_a_gpu_whose_transformer_engine_does_not_load_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    folder()  # its sources alone are here, and cannot be imported
    choice = choose_backend(PrecisionConfig("fp8_delayed"), gpu(monkeypatch, (9, 0)))
    assert choice.value == "emulate"
    assert "transformer_engine.pytorch" in choice.reason


def test_a_layout_that_rules_it_out_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_backend(PrecisionConfig("fp8_delayed"), gpu(monkeypatch, (9, 0)), "parallel.zero=3: frees weights")
    assert choice.value == "emulate"
    assert "parallel.zero=3" in choice.reason
