"""Helpers of the configuration's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import attempt, compose
from conf.problem import Problem
from errors import ConfigRefused


@pytest.fixture(autouse=True)
def somewhere_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder, with a home of its own and no W&B login."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wandb = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "NETRC")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    for name in (*wandb, *ranks):
        monkeypatch.delenv(name, raising=False)
    return work


@pytest.fixture
def refusal() -> Callable[..., str]:
    """The message of the refusal that overrides earn."""

    def refused(*overrides: str, config_dir: Path | None = None) -> str:
        with pytest.raises(ConfigRefused) as caught:
            compose(overrides, str(config_dir) if config_dir else None)
        return str(caught.value)

    return refused


@pytest.fixture
def found() -> Callable[..., list[Problem]]:
    """The problems of overrides."""
    return lambda *overrides: attempt(overrides)[1]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A user's config folder with the given files."""

    def made(**files: str) -> Path:
        root = tmp_path / "mine"
        for name, text in files.items():
            group, _, choice = name.partition("__")
            (root / group).mkdir(parents=True, exist_ok=True)
            (root / group / f"{choice}.yaml").write_text(text, encoding="utf-8")
        return root

    return made
