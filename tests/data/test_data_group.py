"""The choices of data=: every key is known, every source says where it comes from, every file says what it is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.config import DataConfig, SourceConfig
from data.texts.dataset_origin import DatasetOrigin
from data.texts.origins import origin_of

FOLDER = Path(__file__).parents[2] / "conf" / "data"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
CHOICES = {
    "stdlib",
    "sotu",
    "stdlib_sotu",
    "indexed",
    "fineweb_edu",
    "c4",
    "slimpajama",
    "dolma",
    "wikipedia",
    "the_stack",
}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return loaded


def sources(name: str) -> list[SourceConfig]:
    return [SourceConfig(**source) for source in load(name)["sources"]]


def test_the_well_known_corpora_are_there() -> None:
    assert set(NAMES) >= CHOICES


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_known_and_a_name_is_the_files(name: str) -> None:
    loaded = load(name)
    assert set(loaded) <= {field.name for field in fields(DataConfig)}
    assert loaded.get("name", name) == name
    DataConfig(**{**loaded, "sources": tuple(sources(name))})


@pytest.mark.parametrize("name", NAMES)
def test_every_file_begins_with_what_it_is(name: str) -> None:
    first = (FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ") and 30 < len(first) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_every_source_has_one_origin_and_a_name_of_its_own(name: str) -> None:
    found = sources(name)
    assert len({source.name for source in found}) == len(found)
    for source in found:
        given = [key for key in ("prefix", "corpus", "input", "dataset") if getattr(source, key) is not None]
        assert len(given) == 1
    assert all(source.weight is not None for source in found) or len(found) < 2


@pytest.mark.parametrize("name", [name for name in NAMES if name != "indexed" and "sotu" not in name])
def test_every_source_gives_an_origin(name: str) -> None:
    for source in sources(name):
        origin = origin_of(source)
        assert not isinstance(origin, DatasetOrigin) or origin.name.count("/") == 1
