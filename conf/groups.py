"""The choices of each config group, read from the folders that hold them."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.problem import Problem

PRIMARY = "config"


@dataclass(frozen=True)
class Groups:
    """What may be chosen, and from where."""

    folders: tuple[Path, ...]
    """Folders that are searched, first match wins: the repository's, then the user's."""
    choices: Mapping[str, tuple[str, ...]]
    """Group to its choices, sorted."""
    chosen: Mapping[str, str | None]
    """Groups of the primary defaults list, with what they are unless overridden."""

    def file(self, name: str) -> Path | None:
        """The file of `group/choice`, or of the primary config."""
        found = (folder / f"{name}.yaml" for folder in self.folders)
        return next((path for path in found if path.is_file()), None)


def repository_folder() -> Path:
    """The folder of the repository's own YAML files."""
    return Path(__file__).resolve().parent


def read_groups(config_dir: str | None = None) -> Groups:
    """The groups of the repository and of a user's folder."""
    folders = [repository_folder()] + ([Path(config_dir).resolve()] if config_dir else [])
    choices: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            inside = path.relative_to(folder)
            if len(inside.parts) > 1 and not any(part.startswith((".", "_")) for part in inside.parts):
                choices.setdefault(inside.parent.as_posix(), set()).add(path.stem)
    ordered = {group: tuple(sorted(found, key=_by_size)) for group, found in sorted(choices.items())}
    return Groups(tuple(folders), ordered, _primary_defaults(folders[0]))


def _by_size(choice: str) -> tuple[float, str]:
    """Sizes such as 350m and 8b in their order, then names by the alphabet."""
    number, unit = choice[:-1], choice[-1:]
    if number.isdigit() and unit in "mb":
        return (float(number) * {"m": 1e6, "b": 1e9}[unit], choice)
    return (0.0, choice)


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def plain_settings() -> list[Mapping[str, Any]]:
    """What the files of a run without overrides say, nested below their groups; the strongest first."""
    folder = repository_folder()
    chosen = _primary_defaults(folder)
    files = [(group, folder / group / f"{choice}.yaml") for group, choice in chosen.items() if choice]
    return [_load(folder / f"{PRIMARY}.yaml"), *({group: _load(path) or {}} for group, path in files)]


def _primary_defaults(folder: Path) -> dict[str, str | None]:
    raw = _load(folder / f"{PRIMARY}.yaml")
    entries = [entry for entry in raw["defaults"] if isinstance(entry, dict)]
    return {group: choice for entry in entries for group, choice in entry.items()}


def folder_problems(config_dir: str | None) -> list[Problem]:
    """What keeps a user's folder from being used: it is not there, or its files would not be read."""
    if config_dir is None:
        return []
    folder = Path(config_dir)
    if not folder.is_dir():
        there = "is a file" if folder.exists() else "does not exist"
        return [Problem("--config-dir", config_dir, f"the folder {there}", "give a folder that holds GROUP/NAME.yaml")]
    return [*_hidden(folder), *_misnamed(folder)]


def _hidden(folder: Path) -> list[Problem]:
    ours = repository_folder()
    problems = []
    for path in sorted(folder.rglob("*.yaml")):
        inside = path.relative_to(folder)
        twin = ours / inside
        if twin.is_file() and not twin.samefile(path) and not filecmp.cmp(twin, path, shallow=False):
            rule = f"the repository has its own {inside.as_posix()}, which would be read instead"
            problems.append(Problem("--config-dir", str(path), rule, "rename the file and choose it by its new name"))
    return problems


def _misnamed(folder: Path) -> list[Problem]:
    rule = "only files that end in .yaml are read"
    return [
        Problem("--config-dir", str(path), rule, f"rename it to {path.stem}.yaml")
        for path in sorted(folder.glob("*/*.yml"))
    ]
