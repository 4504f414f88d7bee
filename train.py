"""The story of a run: compose, check, make ready, build, loop.

python train.py [key=value ...]     (python train.py --help explains every key)
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import store
from checkpoint.store import RunState
from conf import entry
from conf.resolve import changes, run_directory, run_name, to_dict, to_yaml, total_steps
from conf.schema import Config
from data.batch import MicroBatch, StepBatch
from data.indexed import IndexedCorpus
from data.loader import TrainLoader, validation_batches
from data.order import SampleOrder
from data.prepare import ReadyData, ready
from data.tokenizer import Tokenizer
from errors import ConfigRefused, DataRefused, Diverged, StopRequested
from metrics.clock import StepClock
from metrics.rank_log import rank_log
from metrics.reporter import Reporter, peak_memory_gb
from metrics.run_directory import RunDirectory
from metrics.sinks import Console, JsonLines, Wandb
from metrics.stop_request import StopRequest
from metrics.throughput import throughput
from model.compiled import compile_regions
from model.flops import squared_lengths, step_flops
from model.generate import continue_text
from model.transformer import LossSums, build, count_parameters
from optim.schedule import lr_share, peak_lr, warmup_steps
from optim.updater import StepOutcome, Updater
from parallel.device import set_up_machine


def main(argv: list[str] | None = None) -> int:
    """Command line to exit code; a refusal is a message, never a traceback."""
    return entry.main(run, argv, program="train.py")


def run(config: Config, overrides: list[str]) -> int:
    """One start of a run: find where to go on, make data ready, build, train."""
    refuse_many_processes()
    directory, console = RunDirectory(run_directory(config)), Console()
    with directory.attempt(console):
        found = store.find(config.checkpoint.resume, checkpoint_folder(config, directory))
        saved = store.read_state(found) if found else None
        if found and saved:
            check_resume(config, found, saved, console)
            if saved.step >= last_step(config):
                console.say(f"{run_name(config)} is at step {saved.step} of {last_step(config)}: done ({found})")
                directory.finish("done" if saved.step >= total_steps(config) else "paused", saved.step)
                return 0
        data = ready(config.data, console.say, config.model.vocab_size)
        directory.prepare(to_yaml(config), overrides, saved.step if saved else 0)
        console.open_log(directory.path / "log.txt")
        with rank_log(directory.path / "logs", rank=0):
            trainer = Trainer(config, data, directory, console, saved)
            if found and saved:
                trainer.load(found, saved)
            return trainer.train()


def refuse_many_processes() -> None:
    """Several processes would each train the whole model, one over the other."""
    for variable in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(variable, "1") != "1":
            raise ConfigRefused(
                f"{variable}={os.environ[variable]}: this version trains in one process; start `python train.py`"
            )


def last_step(config: Config) -> int:
    """Step at which this start of the run ends."""
    return min(total_steps(config), config.train.stop_at or total_steps(config))


def checkpoint_folder(config: Config, directory: RunDirectory) -> Path:
    """Where this run's checkpoints are."""
    return Path(config.checkpoint.dir).expanduser() if config.checkpoint.dir else directory.path / "checkpoints"


def check_resume(config: Config, found: Path, saved: RunState, console: Console) -> None:
    """Print how the configuration differs from the checkpoint's; refuse what would change the training."""
    free, refused = changes(saved.config, config)
    if refused:
        names = ",".join(change.key for change in refused)
        raise ConfigRefused(
            f"{found} was written with another training configuration:\n"
            + "".join(f"  {change}\n" for change in refused)
            + f"set these back, choose another run.name for a new run, or accept them: checkpoint.allow=[{names}]"
        )
    console.say(f"resuming from {found} at step {saved.step}")
    for change in free:
        console.say(f"  changed since then: {change}")


@dataclass
class Progress:
    """Where the run stands."""

    step: int = 0
    """Steps done, skipped ones included."""
    samples: int = 0
    """Sequences seen: the data cursor."""
    tokens: int = 0
    """Tokens seen."""
    skipped: int = 0
    """Steps of this start whose gradients were not finite."""
    skipped_in_a_row: int = 0
    """Those of them since the last good step."""


class Trainer:
    """A model, its optimizer, its data and its reports, and the loop over them."""

    def __init__(
        self, config: Config, data: ReadyData, directory: RunDirectory, console: Console, saved: RunState | None
    ) -> None:
        self.config, self.data, self.directory, self.console = config, data, directory, console
        self.folder, self.last, self.progress = checkpoint_folder(config, directory), last_step(config), Progress()
        self.vocab_size = config.model.vocab_size or data.vocab_size
        self.shape = replace(config.model, vocab_size=self.vocab_size)
        self.attempt = directory.status()["attempt"]
        self.announce(saved)
        self.machine = set_up_machine(
            config.train.device, config.train.threads, config.precision, config.metrics.peak_tflops,
            saved.choices.get("matmul") if saved else None, console.say,
        )  # fmt: skip
        self.peak = self.machine.peak
        self.model = build(self.shape, config.run.seed, self.machine.device, self.machine.master_dtype)
        self.updater = Updater(self.model, config.optim, self.machine.compute_dtype)
        if config.train.compile:
            compile_regions(self.model)
            console.say("compile: each block and the loss, once a shape; the first step is slow")
        self.loader, self.validation = self.open_data()
        self.peak_lr = peak_lr(config.optim, config.model.hidden)
        warmup = warmup_steps(config.lr_schedule, total_steps(config))
        source = "optim.lr" if config.optim.lr is not None else "0.75 / model.hidden"
        shape = f"{config.lr_schedule.name} after a warm-up of {warmup} steps"
        console.say(f"learning rate: {self.peak_lr:.2e} ({source}), {shape}")
        self.wandb_id = directory.wandb_id(saved.wandb_id if saved else None)
        self.val_loss = math.nan
        self.clock = StepClock(self.machine.device)
        self.unread: list[tuple[int, StepOutcome]] = []
        self.recorded = 0

    def announce(self, saved: RunState | None) -> None:
        """What begins, where, and how long it is."""
        train, checkpoint = self.config.train, self.config.checkpoint
        begin = saved.step if saved else 0
        self.console.say(f"run {run_name(self.config)} in {self.directory.path}, attempt {self.attempt}")
        self.console.say(
            f"steps {begin + 1} to {self.last} of {total_steps(self.config)}, "
            f"{train.global_batch * train.seq_len:,} tokens each; "
            f"a checkpoint every {checkpoint.every or self.last} steps; W&B {self.config.metrics.wandb}"
        )
        if self.attempt > 1 and saved is None:
            self.console.say("no checkpoint was saved by the attempts before: beginning at the first step")

    def open_data(self) -> tuple[TrainLoader, list[MicroBatch]]:
        """The loader of training steps, and the held-out micro-batches (none without a held-out corpus)."""
        config, source, train = self.config, self.data.source, self.config.train
        corpus = IndexedCorpus(source.train)
        order = SampleOrder(corpus.tokens, train.seq_len, config.run.seed, source.name)
        self.console.say(f"model: {config.model.name}, {count_parameters(self.shape):,} parameters")
        self.console.say(
            f"data: {source.name}, {corpus.tokens:,} tokens, {corpus.documents:,} documents; {order.report}"
        )
        loader = TrainLoader(
            corpus, order, global_batch=train.global_batch, micro_batch=train.micro_batch, seq_len=train.seq_len,
            document_mask=config.data.document_mask, vocab_size=self.vocab_size, prefetch=config.data.prefetch,
        )  # fmt: skip
        if source.validation is None or not train.eval_every:
            self.console.say("validation: none" + ("" if source.validation else " (the source has no held-out corpus)"))
            return loader, []
        held_out = validation_batches(
            IndexedCorpus(source.validation), samples=train.eval_samples, micro_batch=train.micro_batch,
            seq_len=train.seq_len, document_mask=config.data.document_mask, vocab_size=self.vocab_size,
        )  # fmt: skip
        return loader, list(held_out)

    def load(self, found: Path, saved: RunState) -> None:
        """Go on from a checkpoint."""
        here = {self.data.source.name: self.data.fingerprint}
        if saved.data != here:
            raise DataRefused(
                f"{found} was trained on other data than {self.data.source.train} holds now: fingerprints "
                f"{saved.data} then, {here} now; give the run its corpus back, or start another run"
            )
        self.updater.load(store.read_tensors(found), saved.updates)
        self.progress = Progress(saved.step, saved.samples, saved.tokens)
        self.recorded = saved.step

    def train(self) -> int:
        """Train to the last step of this start; the exit code."""
        config = self.config
        stop = StopRequest(self.directory.stop_file)
        with stop.listening(), self.recording_where_it_ends(), self.open_reports() as report, self.loader as loader:
            if self.progress.step:
                report.event("resume", self.progress.step, f"going on after step {self.progress.step}")
            self.clock.finish()
            for batch in loader.steps(self.progress.samples, self.last_sample):
                self.clock.add("data", loader.take_wait())
                loss, z_square, lr = self.take_step(batch)
                if self.due(config.metrics.every):
                    self.report_step(report, batch, loss, z_square, lr)
                if self.validation and self.due(config.train.eval_every):
                    self.evaluate(report)
                asked = stop.asked if self.progress.step < self.last else None
                if asked or len(self.unread) >= config.train.max_skips or self.due(config.checkpoint.every):
                    self.read_skips(report)
                if asked or self.due(config.checkpoint.every):
                    self.save(report)
                if asked:
                    self.directory.stop_file.unlink(missing_ok=True)
                    raise StopRequested(
                        f"stopped by {asked} after step {self.progress.step}; the same command goes on from there"
                    )
            return self.finish(report)

    @contextmanager
    def recording_where_it_ends(self) -> Iterator[None]:
        """Whatever breaks the training off, status.json has the step that was reached."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self.directory.write_status("running", None, self.progress.step, self.attempt)
            raise

    @property
    def last_sample(self) -> int:
        """Where the data cursor will be at the last step."""
        return self.progress.samples + (self.last - self.progress.step) * self.config.train.global_batch

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due now; always so at the last step."""
        return self.progress.step == self.last or (every > 0 and self.progress.step % every == 0)

    def take_step(self, batch: StepBatch) -> tuple[Tensor, Tensor, float]:
        """Forward and backward of every micro-batch, then the update: cross-entropy, logsumexp^2, learning rate."""
        progress, valid = self.progress, max(1, batch.valid_tokens)
        loss = z_square = torch.zeros((), device=self.machine.device)
        for micro_batch in batch.micro_batches:
            with self.clock.part("forward"):
                sums = self.forward(micro_batch, 1.0 / valid)
            with self.clock.part("backward"):
                sums.objective.backward()
            loss, z_square = loss + sums.cross_entropy, z_square + sums.z_square
        lr = self.peak_lr * lr_share(self.config.lr_schedule, progress.step, total_steps(self.config))
        with self.clock.part("optimizer"):
            self.outcome = self.updater.step(lr)
        progress.step += 1
        progress.samples += len(batch.samples)
        progress.tokens += batch.tokens
        self.unread.append((progress.step, self.outcome))
        return loss / valid, z_square / valid, lr

    def forward(self, batch: MicroBatch, scale: float) -> LossSums:
        """The model on one micro-batch."""
        device = self.machine.device
        tensors = (batch.tokens, batch.labels, batch.positions, batch.cu_seqlens)
        return self.model(  # type: ignore[no-any-return]
            *(t.to(device, non_blocking=True) for t in tensors), self.config.train.seq_len,
            documents=self.config.data.document_mask, scale=scale,
        )  # fmt: skip

    def report_step(self, report: Reporter, batch: StepBatch, loss: Tensor, z_square: Tensor, lr: float) -> None:
        """Read the device, record the step with the time of those since the last record, and look for skips."""
        config, progress = self.config, self.progress
        value, norm, steps = loss.item(), self.outcome.grad_norm.item(), progress.step - self.recorded
        seconds, parts = self.clock.finish()
        working = (seconds - parts["evaluation"] - parts["checkpoint"]) / steps
        pairs = sum(squared_lengths(m.cu_seqlens, self.shape.window) for m in batch.micro_batches)
        needed = step_flops(self.shape, batch.tokens, pairs)
        if self.machine.measured:  # by a busy machine, perhaps: no step is faster than the peak
            self.peak = max(self.peak, needed / working)
        speed = throughput(batch.tokens, needed, 0, working, self.peak)
        aux = {"z_loss": config.model.z_loss * z_square.item()} if config.model.z_loss else {}
        report.step({
            "step": progress.step, "loss": value, "aux": aux, "grad_norm": norm, "lr": lr,
            "tokens": progress.tokens, "samples": progress.samples, "tokens_per_s": speed.tokens_per_s,
            "mfu": speed.mfu, "hfu": speed.hfu, "step_time": seconds / steps,
            "time": {name: part / steps for name, part in parts.items()},
            "memory_gb": peak_memory_gb(self.machine.device), "skipped": progress.skipped,
        })  # fmt: skip
        self.recorded = progress.step
        self.read_skips(report)

    def read_skips(self, report: Reporter) -> None:
        """Tell of the steps skipped since the last look, and stop the run if too many came in a row."""
        progress, unread = self.progress, self.unread
        self.unread = []
        for step, outcome in unread:
            if not outcome.skipped.item():
                progress.skipped_in_a_row = 0
                continue
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            report.event("skip", step, f"step {step} changed nothing: its gradients are not finite")
            if progress.skipped_in_a_row >= self.config.train.max_skips:
                raise Diverged(
                    f"{progress.skipped_in_a_row} steps in a row had gradients that are not finite "
                    f"(train.max_skips={self.config.train.max_skips}); lower optim.lr, or look at what these steps "
                    f"read. The newest checkpoint is from before step {step}"
                )

    @torch.no_grad()
    def evaluate(self, report: Reporter) -> None:
        """Loss on the held-out samples, whatever the micro-batch size."""
        with self.clock.part("evaluation"):
            sums = [self.forward(batch, 1.0).cross_entropy.item() for batch in self.validation]
            self.val_loss = sum(sums) / max(1, sum(batch.valid_tokens for batch in self.validation))
        step, name = self.progress.step, self.data.source.name
        text = f"validation at step {step}: loss {self.val_loss:.4f} nats/token"
        report.event("validation", step, text, val_loss=self.val_loss, sources={name: self.val_loss})

    def save(self, report: Reporter) -> None:
        """Write a checkpoint."""
        progress, config = self.progress, self.config
        with self.clock.part("checkpoint"):
            state = RunState(
                progress.step, progress.samples, progress.tokens, self.updater.updates,
                data={self.data.source.name: self.data.fingerprint}, config=to_dict(config),
                vocab_size=self.vocab_size, choices={"matmul": self.machine.matmul}, wandb_id=self.wandb_id,
            )  # fmt: skip
            path = store.save(
                self.folder, self.updater.tensors(), state, keep=config.checkpoint.keep, tokenizer=self.data.tokenizer
            )
        report.event("checkpoint", progress.step, f"saved {path}", path=str(path))
        self.directory.write_status("running", None, progress.step, self.attempt)

    def open_reports(self) -> Reporter:
        """The sinks of this start."""
        config, path = self.config, self.directory.path
        wandb = Wandb(config.metrics, path, run_name(config), self.wandb_id, to_dict(config))
        return Reporter(
            self.console, JsonLines(path / "metrics.jsonl"), wandb, self.attempt, self.progress.step, self.last
        )

    def finish(self, report: Reporter) -> int:
        """Say how good the model is and let it speak; exit code 0."""
        whole = total_steps(self.config)
        state = "done" if self.progress.step >= whole else "paused"
        if self.validation:
            self.console.say(
                f"validation loss {self.val_loss:.3f} nats/token; guessing by frequency alone (unigram entropy) "
                f"gives {self.data.unigram_entropy:.3f}"
            )
        prompt, path = self.config.train.sample_prompt, self.data.tokenizer
        if state == "done" and prompt is not None and path is not None:
            options = {"count": 80, "context": self.config.train.seq_len, "temperature": 0.8, "top_k": 50, "seed": 0}
            self.console.say(f"a sample:\n{continue_text(self.model, Tokenizer(path), prompt, **options)}")
        self.console.say(f"{state} at step {self.progress.step} of {whole}: {self.directory.path}")
        self.directory.finish(state, self.progress.step)
        return 0


if __name__ == "__main__":
    sys.exit(main())
