"""The folders of checkpoints: their names, what is whole, where a run goes on, and which are removed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from checkpoint.agreement import Damaged
from checkpoint.manifest import MANIFEST, check_small
from checkpoint.run_state import STATE, RunState, read_state
from errors import CheckpointRefused
from files import sync, write_whole

LATEST = "latest"


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """All that has the name of a checkpoint, oldest first; a rename gives it that name when it is whole."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint, whether or not `latest` had been moved to it."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def locate(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest one inside it.

    Raises:
        CheckpointRefused: there is none.
    """
    if (path / MANIFEST).is_file() or (path / STATE).is_file():
        return path
    inside = newest(path) or newest(path / "checkpoints")
    if inside is None:
        raise CheckpointRefused(
            f"{path} holds no checkpoint; name a folder like "
            f"runs/NAME/checkpoints/{step_name(100)}, or a run's directory"
        )
    return inside


@dataclass(frozen=True)
class Found:
    """Where a run goes on."""

    path: Path
    """The checkpoint."""
    state: RunState
    """Everything in it but tensors."""
    passed_over: tuple[Damaged, ...] = ()
    """Newer ones that are damaged."""


@dataclass(frozen=True)
class Folders:
    """Where a run's own checkpoints are."""

    main: Path
    """Where all of them come to be."""
    local: Path | None = None
    """A faster folder that has the newest."""

    @property
    def all(self) -> list[Path]:
        """One or both."""
        return [self.main, *([self.local] if self.local else [])]

    def newest_first(self) -> list[Path]:
        """All of both; of one step that of the faster folder comes first."""
        both = [path for folder in self.all for path in list_checkpoints(folder)]
        return sorted(both, key=lambda path: (step_of(path), path.parent != self.main), reverse=True)


def find(resume: str, folders: Folders, unsound: Collection[Damaged] = ()) -> Found | None:
    """The checkpoint to go on from, whose files are all there and whose small ones are as they were written.

    Args:
        resume: auto, none, or the path of a checkpoint, of a folder of checkpoints or of a run. A path is
            where a new run begins; once the run has a checkpoint of its own, the newest is taken. The path of one of
            its own goes back to it, once: those that come of it say so.
        folders: the run's own checkpoints.
        unsound: what was found of the run's checkpoints when their tensors were read.

    Raises:
        CheckpointRefused: the path holds no checkpoint, or a new run was asked for where one exists, or none of those
            that there are is sound.
    """
    _check_folder(folders.main)
    own = folders.newest_first()
    if resume == "none" and own:
        raise CheckpointRefused(
            f"checkpoint.resume=none, but {own[0].parent} already holds {own[0].name}; nothing is overwritten: "
            f"choose another run.name, remove that folder, or use checkpoint.resume=auto to go on"
        )
    if not own:
        return None if resume in ("auto", "none") else _read(locate(Path(resume).expanduser()))
    asked = None if resume == "auto" else Path(resume).expanduser()
    if asked is not None and asked.exists():
        back = next((path for path in own if path.samefile(asked)), None)
        if back is not None and not _comes_of(own, unsound, step_of(back)):
            return _read(back)
    return _newest_sound(own, unsound)


def before(folders: Folders, step: int) -> Found | None:
    """The newest sound checkpoint whose step is below `step`; None where there is none."""
    own = [path for path in folders.newest_first() if step_of(path) < step]
    return _newest_sound(own, ()) if own else None


def _comes_of(own: Iterable[Path], unsound: Collection[Damaged], step: int) -> bool:
    """Whether the run has gone back to a step already."""
    return step in _newest_sound(own, unsound).state.rewound


def _read(path: Path) -> Found:
    check_small(path)
    return Found(path, read_state(path))


def _newest_sound(own: Iterable[Path], unsound: Collection[Damaged]) -> Found:
    """The newest that is sound as far as is known, and those before it.

    Raises:
        CheckpointRefused: there is none.
    """
    known = {each.path: each for each in unsound}
    passed_over: list[Damaged] = []
    for path in own:
        try:
            if path in known:
                raise known[path]
            found = _read(path)
            return Found(found.path, found.state, tuple(passed_over))
        except Damaged as damage:
            passed_over.append(damage)
    told = "\n".join(f"  {each.path}: {each.file.name}: {each.reason}" for each in passed_over)
    raise CheckpointRefused(
        f"none of the run's checkpoints is sound, so there is nothing to go on from:\n{told}\n"
        "restore one of them from a copy; or, to train from the beginning, choose another run.name"
    )


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointRefused(f"{folder} is a file, but must be the folder of the checkpoints; remove it")


def set_aside(folder: Path, step: int) -> list[Path]:
    """Give the checkpoints of a folder that are newer than those of a step other names; returns these."""
    later = [path for path in list_checkpoints(folder) if step_of(path) > step]
    moved = [_renamed(path, "set_aside") for path in later]
    if moved:
        sync(folder)
        write_whole(folder / LATEST, step_name(step) + "\n")
    return moved


def set_damaged(path: Path) -> Path:
    """Give a damaged checkpoint another name, so that the run is not held up by it again; returns it."""
    moved = _renamed(path, "damaged")
    sync(path.parent)
    return moved


def _renamed(path: Path, how: str) -> Path:
    names = (path.with_name(f"{how}_{path.name}.{number}") for number in count(1))
    return path.rename(next(name for name in names if not name.exists()))


def beside(path: Path) -> Path:
    """Where a checkpoint is while it is not whole; every process knows the name."""
    return path.with_name(f".{path.name}.part")


def sweep(folder: Path) -> None:
    """Remove what a killed process of this run left unfinished."""
    for left in folder.glob(".*.part"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def prune(folder: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Take all but the newest `keep` (0: none) and those of every so many steps out of the checkpoints, in one step
    each, so that a kill leaves no half of one; returns what is to be removed."""
    old = [path for path in (list_checkpoints(folder)[:-keep] if keep else []) if is_passing(path, keep_every)]
    return [path.replace(beside(path)) for path in old]


def is_passing(path: Path, keep_every: int) -> bool:
    """Whether a checkpoint is not of those that are kept for ever."""
    return not keep_every or step_of(path) % keep_every != 0
