"""The help text names everything that can be set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.flags import FLAGS
from conf.groups import read_groups
from conf.help import help_text
from conf.schema import Config
from conf.tree import element, field_docs, is_section, leaves, optional, own_leaves, sections

TEXT = help_text()


@pytest.mark.parametrize("key", [key for key in leaves() if key != "extra"])
def test_every_key_stands_in_the_help_with_its_doc(key: str) -> None:
    leaf = leaves()[key]
    doc = field_docs(leaf.owner)[key.rsplit(".", 1)[-1]]
    assert f"  {key}=" in TEXT
    assert doc in " ".join(TEXT.split())


def test_every_field_of_the_schema_has_a_doc() -> None:
    known = leaves().values()
    items = [element(optional(leaf.kind)[0]) for leaf in known]
    owners = {Config, *(leaf.owner for leaf in known), *(item for item in items if is_section(item))}
    fields = [(owner, leaf.key) for owner in owners for leaf in own_leaves(owner)]
    assert [(owner, name) for owner, name in fields if not field_docs(owner).get(name)] == []


def test_every_group_choice_flag_and_section_is_named() -> None:
    rows = re.split(r"\n  (?=\S)", TEXT)
    for group, choices in read_groups().choices.items():
        assert any(row.startswith(f"{group}=") and all(choice in row for choice in choices) for row in rows)
    assert all(name in TEXT for flag in FLAGS for name in flag.names)
    assert all(f" {section}: " in TEXT for section in sections())


def test_the_help_fits_100_columns() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 100] == []


def test_defaults_are_those_of_a_run_without_overrides() -> None:
    assert "train.steps=200 " in TEXT and "data.sources=" in TEXT and "nano*" in TEXT


def test_a_users_choices_are_listed_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("hidden: 64\n")
    assert "mine" in help_text(config_dir=str(tmp_path)) and "mine" not in TEXT.split("Keys:")[0]


def test_the_documented_examples_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    from conf.compose import attempt
    from conf.flags import parse
    from conf.multirun import plan

    commands = [line.strip() for line in TEXT.split("Examples")[1].splitlines() if line.startswith("  python")]
    assert len(commands) == 5
    for command in commands:
        invocation = parse(shlex.split(command)[2:])
        assert plan(invocation.overrides) if invocation.multirun else attempt(invocation.overrides)[1] == []


def test_the_documented_start_of_many_processes_composes() -> None:
    from conf.compose import attempt

    (command,) = (line.split() for line in TEXT.split("Examples")[1].splitlines() if line.startswith("  torchrun"))
    assert command[:4] == ["torchrun", "--nproc-per-node", "4", "train.py"]
    assert attempt(command[4:], world=4)[1] == []
