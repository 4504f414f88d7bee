"""Where a run begins: how far it goes, what there is to go on from, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import store
from checkpoint.store import RunState
from conf.dependence import layout_dependent
from conf.resolve import Change, changes, run_directory, run_name, total_steps
from conf.schema import Config
from errors import ConfigRefused
from metrics.sinks import Console


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
    saved = Saved(found, store.read_state(found))
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
    for sentence in layout_dependent(config):
        if any(change.key.startswith("parallel.") or change.key == "train.micro_batch" for change in free):
            console.say(f"warning: this changes the training, since {sentence}")


def _check_length(config: Config, changed: Sequence[Change]) -> None:
    """Refuse a new length of samples where the run's length in steps would follow from it."""
    if config.train.tokens is not None and any(each.key == "train.seq_len" for each in changed):
        raise ConfigRefused(
            f"train.tokens={config.train.tokens} counts steps of one train.seq_len, and the run goes on with another, "
            f"{config.train.seq_len}: say where it ends in steps, train.steps=N"
        )
