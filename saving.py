"""What a run saves, when, and what becomes of a save that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import TracebackType

from checkpoint.run_state import RunState
from checkpoint.saver import Outcome, Saver
from checkpoint.store import Retention
from conf.resolve import to_dict
from conf.schema import Config
from data.ready import ReadyData
from data.samples import Samples
from engine import Engine
from errors import PeerLost, Refused
from metrics.clock import StepClock
from metrics.inject import Injector
from metrics.reporter import Reporter
from parallel.process import Everyone
from recording import Progress
from start import folders_of


@dataclass(frozen=True)
class Constants:
    """What every checkpoint of one start has in common."""

    vocab_size: int
    """Entries of the model's vocabulary."""
    choices: Mapping[str, str]
    """Automatic choices that must not change when the run goes on."""
    layout: str
    """How the processes share the work, in words."""
    wandb_id: str
    """W&B run to go on with."""
    fingerprints: Mapping[str, str]
    """Of the sources that the run had read before."""
    tokenizer_files: Mapping[str, bytes]
    """Contents of the tokenizer's files, by name."""


class Saving(AbstractContextManager["Saving"]):
    """The checkpoints of one start of a run."""

    def __init__(
        self, config: Config, constants: Constants, engine: Engine, data: ReadyData, samples: Samples,
        everyone: Everyone, clock: StepClock, injector: Injector, report: Reporter, committed: Callable[[int], None],
    ) -> None:  # fmt: skip
        """clock: what training waits for here is a part of its time; committed: told the step of each checkpoint that
        is whole on the disk."""
        self.config, self.constants, self.engine, self.data, self.samples = config, constants, engine, data, samples
        self.clock, self.injector, self.report, self.committed = clock, injector, report, committed
        self.rewound: list[int] = []
        self.newest: int | None = None
        self.failed: Outcome | None = None
        keep = Retention(config.checkpoint.keep, config.checkpoint.keep_every)
        self.saver = Saver(folders_of(config), everyone, keep, config.checkpoint.background, engine.pieces())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What ends all processes together lets the save under way come to its end; else others may be gone."""
        try:
            if isinstance(error, Refused) and not isinstance(error, PeerLost):
                self.settle()
        finally:
            self.saver.close()

    @property
    def must_stop(self) -> bool:
        """Whether a save failed that checkpoint.on_failure does not forgive."""
        return self.failed is not None and self.config.checkpoint.on_failure == "stop"

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint; what is still to be done of the one before is waited for."""
        with self.clock.part("checkpoint"):
            self.settle()
            self.newest = progress.step
            self.saver.save(
                self.engine.pieces(), self.state(progress), files=self.constants.tokenizer_files,
                keep_all=progress.skipped_in_a_row > 0,  # a good one is not to make room for it
                fails=self.injector.disk_full(progress.step),
            )  # fmt: skip
            self.look()

    def look(self) -> None:
        """Tell of a save that has ended since the last look; waits for nothing."""
        self._tell(self.saver.outcome())

    def settle(self) -> None:
        """Wait for the save under way."""
        with self.clock.part("checkpoint"):
            self._tell(self.saver.wait())

    def finish(self) -> None:
        """Wait for the save under way, which must succeed.

        Raises:
            CheckpointRefused: it failed.
        """
        self.settle()
        if self.failed is not None and self.failed.error is not None:
            raise self.failed.error

    def _tell(self, outcome: Outcome | None) -> None:
        """Record how a save ended."""
        if outcome is None:
            return
        self.failed = outcome if outcome.error is not None else None
        if outcome.error is not None:
            text = f"warning: no checkpoint of step {outcome.step}: {outcome.error}"
            self.report.event("save_failed", outcome.step, text, error=str(outcome.error))
            return
        words = f"saved {outcome.path}" + (f" ({outcome.note})" if outcome.note else "")
        self.report.event(
            "checkpoint", outcome.step, words, path=str(outcome.path), seconds=outcome.seconds, held=outcome.held
        )
        self.injector.after_save(outcome.step, outcome.path)
        self.committed(outcome.step)

    def state(self, progress: Progress) -> RunState:
        """Everything but tensors."""
        known = self.constants
        return RunState(
            progress.step, progress.samples, progress.tokens, self.engine.updater.updates,
            data={**known.fingerprints, **{each.name: each.fingerprint for each in self.data.sources}},
            phases=[asdict(each) for each in self.samples.past(progress.samples)], config=to_dict(self.config),
            vocab_size=known.vocab_size, choices=dict(known.choices), layout=known.layout, wandb_id=known.wandb_id,
            tokenizer=next(iter(known.tokenizer_files), self.data.tokenizer),
            tokenizer_fingerprint=self.data.tokenizer_fingerprint, rewound=self.rewound,
        )  # fmt: skip
