"""Where a run begins: how far it goes, what there is to go on from, and whether it may."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.agreement import Damaged
from checkpoint.folder import Folders, before, find, list_checkpoints, set_aside, set_damaged, step_of
from checkpoint.run_state import RunState
from conf.dependence import layout_dependent
from conf.resolve import Change, changes, differing, run_directory, run_name, to_dict, to_yaml, total_steps
from conf.schema import Config
from data.ready import ReadyData
from data.tokenizers.byte_tokenizer import BYTES
from errors import ConfigRefused
from metrics.sinks import Console
from parallel.process import Everyone


def last_step(config: Config) -> int:
    """Step at which this start of the run ends."""
    return min(total_steps(config), config.train.stop_at or total_steps(config))


def checkpoint_folder(config: Config) -> Path:
    """Where this run's checkpoints are."""
    given = config.checkpoint.dir
    return Path(given).expanduser() if given else run_directory(config) / "checkpoints"


def folders_of(config: Config) -> Folders:
    """Where this run's checkpoints are."""
    local = config.checkpoint.local
    return Folders(checkpoint_folder(config), Path(local).expanduser() / run_name(config) if local else None)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that the run goes on from."""

    path: Path
    """Its folder."""
    state: RunState
    """Everything in it but tensors."""
    rewinds: bool = False
    """Whether the run has newer ones, which it leaves to go back to this one."""
    passed_over: tuple[Damaged, ...] = ()
    """Newer ones that are damaged."""


def find_saved(config: Config, console: Console, unsound: Collection[Damaged] = ()) -> Saved | None:
    """The checkpoint to go on from, None for the beginning; says what changed since. Nothing is written.

    Args:
        unsound: what was found of the run's checkpoints when their tensors were read.

    Raises:
        ConfigRefused: it belongs to another training.
        CheckpointRefused: it cannot be read, or a new run was asked for where one exists.
    """
    folders = folders_of(config)
    found = find(config.checkpoint.resume, folders, unsound)
    if found is None:
        if config.checkpoint.allow:
            allowed = ",".join(config.checkpoint.allow)
            console.say(
                f"warning: checkpoint.allow=[{allowed}] has nothing to allow: {run_name(config)} has no checkpoint; to "
                "go on from another run's write run.name or checkpoint.resume=runs/NAME"
            )
        return None
    own, damaged = folders.newest_first(), {each.path for each in found.passed_over}
    newer = [path for path in own if path not in damaged and step_of(path) > found.state.step]
    saved = Saved(found.path, found.state, found.path in own and bool(newer), found.passed_over)
    for damage in saved.passed_over:
        console.say(f"warning: {damage.path} is damaged ({damage.file.name}: {damage.reason}) and passed over")
    _check_resume(config, saved, console)
    return saved


def find_before(config: Config, step: int) -> Saved | None:
    """The newest of the run's own checkpoints whose step is below `step`."""
    found = before(folders_of(config), step)
    return None if found is None else Saved(found.path, found.state, rewinds=True)


FP8_STATE, LOSS_SCALE = "fp8.", "optim.loss_scale"
"""What the names of FP8's scales and of fp16's loss scale begin with in a checkpoint."""
_WINDOW = "health.window"
_SCALED = ("name", "fp8.history", "fp8.first_bf16", "fp8.last_bf16", "fp8.attention", "fp8.mlp", "fp8.experts")


def begins_anew(config: Config, saved: Saved) -> tuple[tuple[str, ...], str]:
    """Beginnings of names of the checkpoint's tensors that a run in another precision cannot go on with, and why."""
    _, other = changes({"precision": saved.state.config.get("precision", {})}, Config(precision=config.precision))
    changed = [each for each in other if each.key.removeprefix("precision.") in _SCALED]
    named = any(each.key == "precision.name" for each in changed)
    found = ((FP8_STATE,) if changed else ()) + ((LOSS_SCALE,) if named else ())
    return found, ", ".join(str(each) for each in changed)


def unlike_window(config: Config, saved: Saved) -> tuple[str, ...]:
    """The name of what the run compared its steps with, if that has another size now: it begins anew."""
    before = saved.state.config.get("health", {}).get("window")
    return () if before == config.health.window else (_WINDOW,)


def newest_words(config: Config) -> str:
    """What there is to go back to."""
    found = list_checkpoints(checkpoint_folder(config))
    return f"The newest checkpoint is {found[-1]}" if found else "There is no checkpoint"


def _check_resume(config: Config, saved: Saved, console: Console) -> None:
    """Print how the configuration differs from the checkpoint's; refuse what would change the training."""
    free, refused = changes(saved.state.config, config)
    if wide := [each for each in (*free, *refused) if each.key == "precision.name" and "fp64" in (each.old, each.new)]:
        raise ConfigRefused(
            f"{saved.path} cannot go on with {wide[0]}: its tensors are fp64 or are to be, and a checkpoint's dtypes "
            f"are never changed in silence; write precision={wide[0].old}, or choose another run.name for a new run"
        )
    if refused:
        names = ",".join(dict.fromkeys((*config.checkpoint.allow, *(change.key for change in refused))))
        raise ConfigRefused(
            f"{saved.path} was written with another training configuration:\n"
            + "".join(f"  {change}\n" for change in refused)
            + f"set these back, choose another run.name for a new run, or accept them: checkpoint.allow=[{names}]"
        )
    _check_length(config, free)
    console.say(f"resuming from {saved.path} at step {saved.state.step}")
    for change in free:
        console.say(f"  changed since then: {change}")
    _warn_of_late_skips(config, saved.state.step, free, console)
    for sentence in layout_dependent(config):
        if any(change.key.startswith("parallel.") or change.key == "train.micro_batch" for change in free):
            console.say(f"warning: this changes the training, since {sentence}")


def _check_length(config: Config, changed: Sequence[Change]) -> None:
    """Refuse changes after which the length of the run, or of its ramp, would be counted from the beginning in steps or
    samples that it did not have then."""
    keys = {each.key for each in changed}
    sizes = keys & {"train.seq_len", "train.global_batch", "train.batch_ramp"}
    if sizes and config.train.tokens is not None:
        raise ConfigRefused(
            f"train.tokens={config.train.tokens} gives the run's length in steps that are all as now, but "
            f"{', '.join(sorted(sizes))} has changed on the way: say where it ends in steps, train.steps=N"
        )
    if "train.seq_len" in keys and config.train.batch_ramp:
        raise ConfigRefused(
            f"train.batch_ramp counts tokens in samples of one length, and train.seq_len is {config.train.seq_len} "
            "from here on: write train.batch_ramp=[], and train.global_batch as it is to be"
        )


def _warn_of_late_skips(config: Config, step: int, changed: Sequence[Change], console: Console) -> None:
    """Steps that are done are not passed over any more."""
    late = [each for each in config.train.skip_steps if each.first <= step]
    if late and any(each.key == "train.skip_steps" for each in changed):
        console.say(
            f"warning: train.skip_steps names steps up to {step}, which are done: what they read was trained on; to "
            "pass over it go back to a checkpoint before them, checkpoint.resume=PATH"
        )


def leave_newer(config: Config, step: int) -> list[Path]:
    """Leave the checkpoints after the one that the run goes back to, under other names; returns these."""
    return [path for folder in folders_of(config).all for path in set_aside(folder, step)]


def leave_damaged(saved: Saved) -> dict[str, str]:
    """Give damaged checkpoints other names: what became of each, by what it is to be told with."""
    told = {}
    for damage in saved.passed_over:
        try:
            where = f"it is kept as {set_damaged(damage.path)}"
        except OSError as error:
            where = f"it stays where it is ({error})"
        told[f"{damage.path}: {damage.file.name}: {damage.reason}"] = where
    return told


def tokenizer_of(config: Config, saved: Saved | None) -> str | None:
    """The tokenizer of a run that goes on, where its configuration leaves it open: the one that it began with."""
    if config.data.tokenizer is not None or saved is None or saved.state.tokenizer is None:
        return None
    bare = saved.state.tokenizer == BYTES
    return BYTES if bare else str(saved.path / saved.state.tokenizer)


def task_text(config: Config, saved: Saved | None, data: ReadyData, device: torch.device) -> str:
    """What must be the same on every process, in words."""
    begin = f"from step {saved.state.step}" if saved else "from the beginning"
    settings = hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12]
    return (
        f"run {run_name(config)} {begin} to {last_step(config)}, settings {settings}, data {data.fingerprint[:12]}, "
        f"{device.type}, torch {torch.__version__}"
    )


def require_one_task(everyone: Everyone, config: Config, text: str) -> None:
    """Refuse processes that are to do different things, naming the settings that differ."""
    if len(set(everyone.gather(text))) > 1:
        settings = [json.loads(each) for each in everyone.gather(json.dumps(to_dict(config)))]
        keys = sorted({key for each in settings for key in differing(settings[0], each)})
        what = f"the settings {', '.join(keys)}" if keys else "what they are to do"
        everyone.require_same(what, text)
