"""What became of each step, read where a step is recorded so that none waits for its answer: skips, spikes, slow ranks,
weights that differ."""

from __future__ import annotations

from collections.abc import Callable

from conf.schema import Config
from engine import Engine
from errors import Diverged
from faults import FaultFiles
from metrics.reporter import Reporter
from metrics.stragglers import Stragglers
from parallel.process import Everyone
from parallel.replicas import check_replicas
from recording import Done, Progress
from start import newest_words


class GoBack(Exception):
    """Training is to go back to a checkpoint before a spike."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to a checkpoint before step {step}")
        self.step = step


class Watching:
    """Looks at the outcomes of steps, and says what is to be said of them."""

    def __init__(
        self, config: Config, engine: Engine, everyone: Everyone, report: Reporter, stragglers: Stragglers,
        faults: FaultFiles, work: Callable[[], float],
    ) -> None:  # fmt: skip
        """work: seconds that this rank itself has worked since it was last asked."""
        self.config, self.engine, self.everyone, self.report = config, engine, everyone, report
        self.stragglers, self.faults, self.work = stragglers, faults, work
        self.unread: list[Done] = []
        self.located = 0

    def add(self, done: Done) -> None:
        """A step that was made."""
        self.unread.append(done)
        for finding in self.stragglers.add(self.everyone, self.work()):
            self.report.event("straggler", done.step, f"after step {done.step} {finding.words}", **finding.values)

    @property
    def are_many(self) -> bool:
        """Whether as many steps are unread as may be skipped in a row."""
        return len(self.unread) >= self.config.train.max_skips

    def forget(self) -> None:
        """Steps that the run has gone back before are not looked at."""
        self.unread = []

    def read(self, progress: Progress) -> None:
        """Tell of the steps since the last look that had no effect or stand out.

        Raises:
            Diverged: too many skips in a row, or a spike where health.spike=stop.
            GoBack: a spike where health.spike=rollback.
        """
        unread, self.unread = self.unread, []
        for done in unread:
            if done.outcome.skipped.item():
                self._skipped(progress, done)
                continue
            progress.skipped_in_a_row = progress.hopeless_in_a_row = 0
            if done.outcome.spike is not None and done.outcome.spike.item():
                self._spiked(progress, done)

    def _skipped(self, progress: Progress, done: Done) -> None:
        """Count a skip.

        One that lowers fp16's loss scale is how the scale is found, from an initial one that is too large as after
        each doubling: train.max_skips does not count it. A run that has diverged comes down to precision.fp16.least
        within so many halvings, from where on every skip counts.
        """
        most = self.config.train.max_skips
        hopeless = not self._tell_skip(done)
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        progress.hopeless_in_a_row += hopeless
        if hopeless and self.located < self.config.health.locate:
            self.located += 1
            self._locate(progress, done)
        if progress.hopeless_in_a_row >= most:
            raise Diverged(
                f"{progress.hopeless_in_a_row} steps in a row had gradients that are not finite "
                f"(train.max_skips={most}); lower optim.lr, or look at what these steps read. "
                + newest_words(self.config)
            )

    def _tell_skip(self, done: Done) -> bool:
        """Record a skipped step; whether it lowered the loss scale."""
        step, outcome = done.step, done.outcome
        text = f"step {step} changed nothing: its gradients are not finite"
        if outcome.loss_scale is None:
            self.report.event("skip", step, text)
            return False
        scale, after = (each.item() for each in outcome.loss_scale)
        change = f"is lowered from {scale:.12g} to" if after < scale else "stays at its least,"
        self.report.event("skip", step, f"{text}; the loss scale {change} {after:.12g}", loss_scale=after)
        return after < scale

    def _locate(self, progress: Progress, done: Done) -> None:
        """Make the step again, watched; say where it went wrong, and keep what it takes to do so once more."""
        text, values = self.faults.take(progress, done)
        self.report.event("fault", done.step, f"step {done.step}: {text}", **values)

    def _spiked(self, progress: Progress, done: Done) -> None:
        """A finite loss or norm far above those before it."""
        policy, step, outcome = self.config.health.spike, done.step, done.outcome
        loss = outcome.loss.item() if outcome.loss is not None else float("nan")
        norm, (most, most_norm) = outcome.grad_norm.item(), self.engine.window.limits().tolist()
        text = (
            f"spike at step {step}: loss {loss:.4g}, gradient norm {norm:.4g}; above {most:.4g} or {most_norm:.4g}, "
            f"health.sigma={self.config.health.sigma:g} over {self.config.health.window} steps"
        )
        if policy == "skip":
            progress.skipped += 1
            text += "; the step changed nothing"
        samples = [done.batch.samples.start, done.batch.samples.stop]
        self.report.event("spike", step, text, loss=loss, grad_norm=norm, samples=samples, policy=policy)
        if policy == "stop":
            raise Diverged(f"{text}. Stopped, as health.spike=stop says. {newest_words(self.config)}")
        if policy == "rollback":
            raise GoBack(step)

    def compare_replicas(self, step: int) -> None:
        """Weights that several ranks hold must be the same bits.

        Raises:
            Diverged: they are not.
        """
        differing = check_replicas(self.engine.updater.tensors(), self.everyone)
        if not differing:
            return
        words = "; ".join(each.words for each in differing[:5])
        text = f"at step {step} ranks hold different values of the same weights: {words}"
        self.report.event("replicas", step, text, weights=[each.name for each in differing])
        raise Diverged(
            f"{text}. A device or its memory is faulty, or a sum was lost on the way: start again without that host, "
            f"from a checkpoint before step {max(0, step - self.config.metrics.replica_check)}, when all was the same "
            "(checkpoint.resume=PATH)"
        )
