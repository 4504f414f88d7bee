"""Where a run begins: how far it goes, what there is to go on from, and whether it may."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import store
from checkpoint.store import RunState
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint that the run goes on from."""

    path: Path
    """Its folder."""
    state: RunState
    """Everything in it but tensors."""
    rewinds: bool = False
    """Whether the run has newer ones, which it leaves to go back to this one."""


def find_saved(config: Config, console: Console) -> Saved | None:
    """The checkpoint to go on from, None for the beginning; says what changed since. Nothing is written.

    Raises:
        ConfigRefused: it belongs to another training.
        CheckpointRefused: it cannot be read, or a new run was asked for where one exists.
    """
    found = store.find(config.checkpoint.resume, checkpoint_folder(config))
    if found is None:
        if config.checkpoint.allow:
            allowed = ",".join(config.checkpoint.allow)
            console.say(
                f"warning: checkpoint.allow=[{allowed}] has nothing to allow: {run_name(config)} has no checkpoint; to "
                "go on from another run's write run.name or checkpoint.resume=runs/NAME"
            )
        return None
    newest = store.newest(checkpoint_folder(config))
    rewinds = newest is not None and found != newest and found.parent == newest.parent
    saved = Saved(found, store.read_state(found), rewinds)
    _check_resume(config, saved, console)
    return saved


FP8_STATE, LOSS_SCALE = "fp8.", "optim.loss_scale"
"""What the names of FP8's scales and of fp16's loss scale begin with in a checkpoint."""
_SCALED = ("name", "fp8.history", "fp8.first_bf16", "fp8.last_bf16", "fp8.attention", "fp8.mlp", "fp8.experts")


def begins_anew(config: Config, saved: Saved) -> tuple[tuple[str, ...], str]:
    """Beginnings of names of the checkpoint's tensors that a run in another precision cannot go on with, and why."""
    _, other = changes({"precision": saved.state.config.get("precision", {})}, Config(precision=config.precision))
    changed = [each for each in other if each.key.removeprefix("precision.") in _SCALED]
    named = any(each.key == "precision.name" for each in changed)
    found = ((FP8_STATE,) if changed else ()) + ((LOSS_SCALE,) if named else ())
    return found, ", ".join(str(each) for each in changed)


def newest_words(config: Config) -> str:
    """What there is to go back to."""
    found = store.list_checkpoints(checkpoint_folder(config))
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


def set_aside(saved: Saved, console: Console) -> None:
    """Leave the checkpoints after the one that the run goes back to, under other names."""
    for path in store.set_aside(saved.path):
        console.say(f"going back to step {saved.state.step}: a later checkpoint is now {path}")


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
