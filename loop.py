"""The loop over the steps of a run: read, agree, train, record, validate, save; and every way out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from assembly import Assembly
from conf.resolve import ramp_of, total_steps
from data.batch import StepBatch
from data.config import StepRange
from data.ramp import PlannedStep
from engine import Agreed
from errors import Diverged, StopRequested
from metrics.goodput import Goodput
from metrics.reporter import Reporter
from metrics.stop_request import StopRequest
from optim.schedule import lr_share
from parallel.waits import recorded_waits, wait_words
from reading import Validation
from recording import Done, Recorder
from saving import Saving
from start import find_before, last_step, leave_damaged, leave_newer
from watching import GoBack, Watching

_WATCHED = 3  # which step of a start is watched for waits: by then what is made once has been made


class Loop:
    """The steps of one start."""

    def __init__(
        self, assembly: Assembly, stop: StopRequest, report: Reporter, saving: Saving, watching: Watching,
        ledger: Goodput | None, collect: Callable[[int], None],
    ) -> None:  # fmt: skip
        """ledger: what time was used for, on the process that leads; collect: Python's garbage, told of each step."""
        self.assembly, self.stop, self.report, self.saving, self.watching = assembly, stop, report, saving, watching
        self.ledger, self.collect = ledger, collect
        self.config, self.engine, self.everyone = assembly.config, assembly.engine, assembly.everyone
        self.clock, self.progress, self.last = assembly.clock, assembly.progress, last_step(assembly.config)
        self.recorder = Recorder(
            self.config, assembly.shape, self.engine, assembly.samples, self.clock, assembly.machine, self.everyone
        )
        self.validation: Validation | None = None
        self.fp8_watched, self.begin, self.rollbacks = False, self.progress.step, 0
        self.recorded = self.begin
        self.passed_over: list[StepRange] = []
        self.looks_at = self.begin + _WATCHED

    def train(self) -> int:
        """Train to the last step of this start; the exit code."""
        self.tell_beginning()
        self.clock.finish()
        with self.recording_where_it_ends():
            while True:
                try:
                    for batch in self.batches():
                        self.take(batch)
                    return self.finish()
                except GoBack as back:
                    spike = back.step
                self.go_back(spike)

    def tell_beginning(self) -> None:
        """What the run goes on from."""
        assembly, saved = self.assembly, self.assembly.saved
        if self.ledger:
            self.ledger.begin()
        if saved is None:
            return
        moved = leave_newer(self.config, self.begin) if assembly.leads and saved.rewinds else []
        for path in moved:
            assembly.console.say(f"going back to step {self.begin}: a later checkpoint is now {path}")
        if assembly.leads:
            for what, where in leave_damaged(saved).items():
                self.report.event("damaged", self.begin, f"a damaged checkpoint is passed over: {what}; {where}")
        shares = assembly.samples.shares(self.progress.samples)
        words = assembly.layout.words
        if self.begin:
            self.report.event("resume", self.begin, f"going on after step {self.begin}", layout=words, mixture=shares)

    def batches(self) -> Iterator[StepBatch]:
        """What this process reads in each step that is left."""
        assembly = self.assembly
        steps = assembly.loader.steps(self.plan())
        while self.progress.step < self.last:
            for each in (assembly.watchdog, assembly.injector):
                each.begin_step(self.progress.step + 1)
            with self.clock.telling("data"):
                batch = next(steps)
            self.clock.add("data", assembly.loader.take_wait())
            yield batch

    def plan(self) -> Iterator[PlannedStep]:
        """The steps of this start."""
        skips = [*self.config.train.skip_steps, *self.passed_over]
        return ramp_of(self.config).plan(self.progress.samples, self.progress.step, self.last, skips)

    def take(self, batch: StepBatch) -> None:
        """A step and all that is due after it."""
        config = self.config
        agreed = self.engine.agree(self.everyone, batch, self.stop.asked is not None or self.saving.must_stop)
        if agreed.stops and self.progress.step > self.begin:
            self.stop_here()
        if batch.passed_over:
            self.pass_over(batch)
        else:
            self.train_on(batch, agreed)
        self.collect(self.progress.step)
        if self.assembly.held_out and self.due(config.train.eval_every):
            self.evaluate()
        if self.watching.are_many or self.due(config.checkpoint.every):
            self.watching.read(self.progress)
        if config.metrics.replica_check and self.due(config.metrics.replica_check):
            self.watching.compare_replicas(self.progress.step)
        if self.due(config.checkpoint.every):
            self.save_if_sound()
        else:
            self.saving.look()

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due now; always so at the last step."""
        return self.progress.step == self.last or (every > 0 and self.progress.step % every == 0)

    def will_be_due(self, every: int) -> bool:
        """Whether something is due after the coming step that is told in its record."""
        step = self.progress.step + 1
        recorded = step == self.last or step % self.config.metrics.every == 0
        return every > 0 and recorded and (step % every == 0 or step == self.last)

    def pass_over(self, batch: StepBatch) -> None:
        """Count a step's samples as read."""
        self.count(batch)
        step = self.progress.step
        why = "after the spike" if any(each.holds(step) for each in self.passed_over) else "as train.skip_steps says"
        text = f"step {step} is passed over, {why}: its samples count as read"
        self.report.event("skip", step, text, samples=[batch.samples.start, batch.samples.stop])

    def count(self, batch: StepBatch) -> None:
        """Go a step further."""
        self.progress.step += 1
        self.progress.samples += len(batch.samples)
        self.progress.tokens += len(batch.samples) * self.config.train.seq_len

    def train_on(self, batch: StepBatch, agreed: Agreed) -> None:
        """One step, and its record where one is due."""
        with self.watching_waits():
            done = self.take_step(batch, agreed)
        self.recorder.count(done)
        self.watching.add(done)
        if self.due(self.config.metrics.every):
            self.record(done)
            self.watching.read(self.progress)

    def take_step(self, batch: StepBatch, agreed: Agreed) -> Done:
        """One step of the engine: what came of it is still on the device."""
        lr = self.assembly.peak_lr * lr_share(self.config.lr_schedule, self.progress.step, total_steps(self.config))
        self.fp8_watched = self.engine.watchable and self.will_be_due(self.config.precision.fp8.health_every)
        self.engine.watch(self.fp8_watched)
        sums, outcome = self.engine.step(batch.micro_batches, agreed.valid_tokens, lr)
        self.count(batch)
        return Done(self.progress.step, batch, agreed, sums, outcome, lr)

    def record(self, done: Done) -> None:
        """Read the device and record the steps since the last record."""
        record, seconds, parts = self.recorder.record(self.progress, done, self.fp8_watched)
        if self.ledger:
            self.ledger.add(self.recorded + 1, done.step, seconds, parts)
            record["goodput"] = self.ledger.summary()
        self.recorded = done.step
        self.report.step(record)

    @contextmanager
    def watching_waits(self) -> Iterator[None]:
        """One step of a start on CUDA is watched for places where the host waits for the device."""
        if self.assembly.machine.device.type != "cuda" or self.progress.step + 1 != self.looks_at:
            yield
            return
        with recorded_waits() as places:
            yield
        for rank, words in enumerate(self.everyone.gather(wait_words(places))):
            if words:
                text = f"in step {self.progress.step} rank {rank} waited for its device, which costs speed: {words}"
                self.report.event("warning", self.progress.step, text)

    def evaluate(self) -> None:
        """Loss on the held-out samples of each source, whatever the micro-batch size and the layout."""
        held_out = self.assembly.held_out
        with self.clock.part("evaluation"):
            sums = [self.engine.evaluate(each.batches) for each in held_out]
        self.validation = Validation(held_out, sums, self.assembly.valid_held_out)
        self.report.event(
            "validation", self.progress.step, f"validation at step {self.progress.step}: {self.validation.words()}",
            val_loss=self.validation.whole, sources=self.validation.by_source(),
        )  # fmt: skip

    def save_if_sound(self) -> None:
        """Save, unless the latest steps were skipped: the weights may be past saving, and a good checkpoint is not to
        make room for them. The last step is saved all the same."""
        progress = self.progress
        if progress.skipped_in_a_row and progress.step != self.last:
            text = f"no checkpoint at step {progress.step}: the gradients of the latest steps are not finite"
            self.report.event("warning", progress.step, text)
        else:
            self.save()

    def save(self) -> None:
        """Begin a checkpoint."""
        self.saving.save(self.progress)

    def stop_here(self) -> None:
        """Save and end, as somebody asked, or as a save has failed."""
        self.watching.read(self.progress)
        self.saving.settle()
        if self.saving.must_stop:
            self.saving.finish()
        if self.saving.newest != self.progress.step or self.saving.failed is not None:
            self.save()
        self.saving.finish()
        if self.assembly.leads:
            self.assembly.directory.stop_file.unlink(missing_ok=True)
        raise StopRequested(
            f"stopped by {self.stop.asked or 'another process'} after step {self.progress.step}; the same command goes "
            "on from there"
        )

    def go_back(self, spike: int) -> None:
        """Load the checkpoint before a spike; the data that led to it will be passed over.

        Raises:
            Diverged: there is none, or the run has gone back too often.
        """
        health = self.config.health
        first = max(1, spike - health.pass_over + 1)
        self.saving.settle()
        saved = find_before(self.config, first)
        if saved is None or self.rollbacks >= health.max_rollbacks:
            why = (
                f"this start has gone back {self.rollbacks} times already (health.max_rollbacks={health.max_rollbacks})"
                if saved else f"there is no checkpoint before step {first}"
            )  # fmt: skip
            raise Diverged(
                f"the spike at step {spike} cannot be passed over: {why}; lower optim.lr, or look at the data"
            )
        self.everyone.require_same("where they go back to", saved.path.name)
        self.rollbacks += 1
        self.passed_over.append(StepRange(first, spike))
        with self.clock.part("checkpoint"):
            self.assembly.load(saved)
        self.recorder.forget()
        self.recorded = saved.state.step
        self.watching.forget()
        if self.assembly.leads:
            leave_newer(self.config, saved.state.step)
        self.saving.rewound = [*self.saving.rewound, saved.state.step]
        text = f"back to step {saved.state.step}, to pass over the data of step {first} to {spike}"
        self.report.event("rollback", saved.state.step, text, first=first, last=spike)

    @contextmanager
    def recording_where_it_ends(self) -> Iterator[None]:
        """Whatever breaks the training off, status.json has the step that was reached."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if self.assembly.leads:
                    self.assembly.directory.note_step(self.progress.step, self.assembly.attempt)
            raise

    def finish(self) -> int:
        """See the last checkpoint written, say how good the model is and let it speak; exit code 0.

        Raises:
            CheckpointRefused: the last checkpoint could not be written.
            Diverged: no step of the run changed anything, or the model gives no finite loss any more.
        """
        whole, assembly, say, progress = (
            total_steps(self.config),
            self.assembly,
            self.assembly.console.say,
            self.progress,
        )
        self.saving.finish()
        state = "done" if progress.step >= whole else "paused"
        if state == "done" and self.engine.updater.updates == 0:
            raise Diverged(
                f"none of the run's {whole} steps changed anything: their gradients are not finite; lower optim.lr, "
                "or in fp16 precision.fp16.initial, or look at what these steps read"
            )
        losses = self.validation.losses if self.validation else {}
        if broken := [name for name, loss in losses.items() if not math.isfinite(loss)]:
            raise Diverged(
                f"after the last step the validation loss of {', '.join(broken)} is not finite: the model is past use; "
                "lower optim.lr, and go on from a checkpoint before its losses rose (checkpoint.resume=PATH)"
            )
        if progress.hopeless_in_a_row:
            say(f"warning: the last {progress.skipped_in_a_row} steps changed nothing: their gradients are not finite")
        for line in self.validation.verdict() if self.validation else ():
            say(line)
        if state == "done":
            assembly.say_sample()
        if self.ledger:
            say(self.ledger.words())
        say(f"{state} at step {progress.step} of {whole}: {assembly.directory.path}")
        if assembly.leads:
            assembly.directory.finish(state, progress.step)
        return 0
