"""One start of a run on one process: find where to go on, make data ready, join the others, build, loop."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from announce import announce_products, announce_schedule, announce_slow_experts, announce_start
from checkpoint import store
from checkpoint.store import RunState
from conf.resolve import ramp_of, run_directory, run_name, to_dict, to_yaml, total_steps
from conf.schema import Config
from data.batch import StepBatch
from data.ramp import PlannedStep
from data.ready import ReadyData, ready
from data.tokenizers.tokenizer import load_tokenizer
from engine import Agreed, Engine, StepSums
from errors import Diverged, StopRequested
from metrics.clock import StepClock
from metrics.follower import Follower
from metrics.rank_log import rank_log
from metrics.reporter import Reporter, peak_memory_gb
from metrics.run_directory import RunDirectory
from metrics.sinks import Console, JsonLines, Wandb
from metrics.stop_request import StopRequest
from metrics.throughput import throughput
from model.balance import losses, summary
from model.flops import inactive_parameters, recomputed_flops, step_flops
from model.generate import continue_text
from model.transformer import count_parameters
from optim.schedule import lr_share, peak_lr
from optim.updater import StepOutcome
from parallel.device import Machine, local_device, set_up_machine
from parallel.garbage import collecting
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.process import Everyone, joined
from parallel.ranks import Ranks, find_ranks
from parallel.waits import recorded_waits, wait_words
from reading import Share, Validation, open_held_out, open_loader, open_samples
from start import (
    Saved,
    begins_anew,
    checkpoint_folder,
    find_saved,
    last_step,
    newest_words,
    require_one_task,
    set_aside,
    task_text,
    tokenizer_of,
)

_WATCHED = 3  # which step of a start is watched for waits: by then what is made once has been made


def run(config: Config, overrides: list[str]) -> int:
    """One start of a run on this process: find where to go on, make data ready, join the others, build, train."""
    ranks = find_ranks(os.environ)
    leads = ranks.rank == 0
    directory, console = RunDirectory(run_directory(config)), Console(silent=not leads)
    follower = Follower(directory, ranks.rank, first_on_host=ranks.local_rank == 0)
    with directory.attempt(console) if leads else follower:
        saved = find_saved(config, console)
        if saved and saved.state.step >= last_step(config):
            done = "done" if saved.state.step >= total_steps(config) else "paused"
            console.say(f"{run_name(config)} is at step {saved.state.step} of {last_step(config)}: done ({saved.path})")
            if leads:
                directory.finish(done, saved.state.step)
            return 0
        data = ready(config.data, console.say, config.model.vocab_size, tokenizer=tokenizer_of(config, saved))
        device = local_device(config.train.device, ranks.local_rank)
        with joined(ranks, device, config.parallel.timeout) as everyone:
            follower.joined = True
            require_one_task(everyone, config, task_text(config, saved, data, device))
            words = f"{ranks.world} by {ranks.source}: {layout_of(config.parallel, ranks.world).words}"
            if leads:
                directory.prepare(saved.state.step if saved else 0)
                console.open_log(directory.path / "log.txt")
            everyone.barrier()
            with rank_log(directory.path / "logs", ranks.rank):
                trainer = Trainer(config, data, directory, console, ranks, everyone, saved)
                if leads:  # a start that was refused leaves no word of its settings
                    directory.record(to_yaml(config), overrides, words)
                    if saved and saved.rewinds:
                        set_aside(saved, console)
                return trainer.train()


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
    hopeless_in_a_row: int = 0
    """Of those again, the ones that lowered no loss scale: what train.max_skips counts."""


class Unrecorded(NamedTuple):
    """What was trained on since the last record."""

    steps: int = 0
    """Steps, passed-over ones left out."""
    tokens: int = 0
    """Tokens of them."""
    pairs: int = 0
    """Squared lengths of their attention segments, summed."""


class Trainer:
    """The engine, its data and its reports on this process, and the loop over them."""

    def __init__(
        self, config: Config, data: ReadyData, directory: RunDirectory, console: Console, ranks: Ranks,
        everyone: Everyone, saved: Saved | None,
    ) -> None:  # fmt: skip
        self.config, self.data, self.directory, self.console = config, data, directory, console
        self.everyone, self.leads, self.last = everyone, everyone.rank == 0, last_step(config)
        self.progress, self.unrecorded = Progress(), Unrecorded()
        self.fingerprints: dict[str, str] = {}  # of sources that the run has read, some of them in the past
        self.shape = replace(config.model, vocab_size=config.model.vocab_size or data.vocab_size)
        self.attempt = int(everyone.gather(str(directory.status().get("attempt", 1)))[0])
        self.layout = layout_of(config.parallel, everyone.world)
        begin = saved.state.step if saved else None
        announce_start(config, self.shape, self.layout, ranks, begin, self.attempt, console.say)
        self.machine = self.set_up(ranks, saved)
        self.peak = self.machine.peak
        self.clock = StepClock(self.machine.device)
        mesh = make_mesh(
            self.layout, everyone.rank, self.machine.device, config.parallel.timeout,
            experts=config.model.moe is not None, maxima=config.precision.name == "fp8_delayed",
        )  # fmt: skip
        self.engine = Engine(config, self.shape, mesh, self.machine, self.clock)
        self.choices = {"matmul": self.machine.matmul}
        if (products := self.engine.products) is not None:
            everyone.require_same("who makes FP8 products", products.value)
            self.choices["fp8"] = products.value
            before = saved.state.choices.get("fp8") if saved else None
            announce_products(products, self.machine, before, console.say)
        announce_slow_experts(config, self.machine, console.say)
        self.open_data(saved, mesh.dp_rank)
        self.tokenizer_files = data.tokenizer_files()  # now: a checkpoint that it is read from may be pruned
        self.tokenizer = (
            load_tokenizer(data.tokenizer, lambda _: None) if data.tokenizer and config.train.sample_prompt else None
        )
        self.rewound = [*saved.state.rewound, *([saved.state.step] if saved.rewinds else [])] if saved else []
        self.peak_lr = peak_lr(config.optim, config.model.hidden)
        announce_schedule(config, self.peak_lr, console.say)
        own = saved is not None and saved.path.parent == checkpoint_folder(config)  # else it is another run's
        self.wandb_id = directory.wandb_id(saved.state.wandb_id if saved and own else None) if self.leads else ""
        self.validation: Validation | None = None
        self.watched = False
        self.unread: list[tuple[int, StepOutcome]] = []
        if saved:
            self.load(saved)
        self.looks_at = self.progress.step + _WATCHED

    def set_up(self, ranks: Ranks, saved: Saved | None) -> Machine:
        """Device, threads and products; how fp32 products are made is rank 0's choice for all."""

        def choose(matmul: str | None) -> Machine:
            config = self.config
            return set_up_machine(
                config.train.device, ranks.local_rank, config.train.threads, ranks.local_world,
                config.precision, config.metrics.peak_tflops, matmul, self.console.say,
            )  # fmt: skip

        was_fp32 = saved is not None and saved.state.config.get("precision", {}).get("name") == "fp32"
        kept = saved.state.choices.get("matmul") if saved and was_fp32 else None
        machine = choose(kept) if self.leads else None
        chosen = self.everyone.gather(machine.matmul if machine else "")[0]
        machine = machine or choose(chosen)
        self.everyone.require_same("how fp32 products are made", machine.matmul)
        return machine

    def open_data(self, saved: Saved | None, dp_rank: int) -> None:
        """The samples of the run, this process's loader of them, and its held-out sequences."""
        config, say, everyone = self.config, self.console.say, self.everyone
        count, unused = count_parameters(self.shape), inactive_parameters(self.shape)
        used = f", of which a token uses {count - unused:,}" if unused else ""
        say(f"model: {config.model.name}, {count:,} parameters{used}")
        share = Share(
            self.shape.vocab_size or 0, dp_rank, self.layout.dp,
            group=self.engine.micro_batches if config.parallel.pp > 1 else 1, pin=self.machine.device.type == "cuda",
        )  # fmt: skip
        self.samples = open_samples(config, self.data, saved.state if saved else None, say)
        self.loader = open_loader(config, self.samples, share)
        self.held_out = open_held_out(config, self.data, share, say)
        counted = everyone.add([each.valid_tokens for each in self.held_out]) if self.held_out else []
        self.valid_held_out = [max(1, count * self.layout.dp // everyone.world) for count in counted]

    def load(self, saved: Saved) -> None:
        """Go on from a checkpoint, whatever layout wrote it."""
        state = saved.state
        fresh, why = begins_anew(self.config, saved)
        if fresh:
            self.console.say(f"scales begin anew, if there are any: {why}")
        store.load(saved.path, self.engine.pieces(), everyone=self.everyone, fresh=fresh)
        self.engine.resume(state.updates)
        self.progress = Progress(state.step, state.samples, state.tokens)
        self.fingerprints = state.data

    def train(self) -> int:
        """Train to the last step of this start; the exit code."""
        config, begin = self.config, self.progress.step
        stop = StopRequest(self.directory.stop_file if self.leads else None)
        with (
            stop.listening(), self.recording_where_it_ends(), self.open_reports() as report, self.loader as loader,
            collecting(config.train.gc_every) as collect_garbage,
        ):  # fmt: skip
            if begin:
                shares = self.samples.shares(self.progress.samples)
                report.event(
                    "resume", begin, f"going on after step {begin}", layout=self.layout.words, mixture=shares
                )  # fmt: skip
            self.clock.finish()
            for batch in loader.steps(self.plan()):
                self.clock.add("data", loader.take_wait())
                agreed = self.engine.agree(self.everyone, batch, stop.asked is not None)
                if agreed.stops and self.progress.step > begin:
                    self.stop_here(report, stop.asked)
                if batch.passed_over:
                    self.pass_over(report, batch)
                else:
                    self.train_on(report, batch, agreed)
                collect_garbage(self.progress.step)
                if self.held_out and self.due(config.train.eval_every):
                    self.evaluate(report)
                if len(self.unread) >= config.train.max_skips or self.due(config.checkpoint.every):
                    self.read_skips(report)
                if self.due(config.checkpoint.every):
                    self.save_if_sound(report)
            return self.finish(report)

    def stop_here(self, report: Reporter, asked: str | None) -> None:
        """Save and end, as somebody asked."""
        self.read_skips(report)
        if not self.due(self.config.checkpoint.every):  # else it has just been saved
            self.save(report)
        if self.leads:
            self.directory.stop_file.unlink(missing_ok=True)
        raise StopRequested(
            f"stopped by {asked or 'another process'} after step {self.progress.step}; the same command goes on "
            "from there"
        )

    @contextmanager
    def recording_where_it_ends(self) -> Iterator[None]:
        """Whatever breaks the training off, status.json has the step that was reached."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if self.leads:
                    self.directory.note_step(self.progress.step, self.attempt)
            raise

    def plan(self) -> Iterator[PlannedStep]:
        """The steps of this start."""
        skips = self.config.train.skip_steps
        return ramp_of(self.config).plan(self.progress.samples, self.progress.step, self.last, skips)

    def train_on(self, report: Reporter, batch: StepBatch, agreed: Agreed) -> None:
        """One step, and its record where one is due."""
        with self.watching_waits(report):
            sums, lr = self.take_step(batch, agreed)
        if self.due(self.config.metrics.every):
            self.report_step(report, batch, agreed, sums, lr)

    def pass_over(self, report: Reporter, batch: StepBatch) -> None:
        """Count a step's samples as read."""
        self.count(batch)
        text = f"step {self.progress.step} is passed over, as train.skip_steps says: its samples count as read"
        report.event("skip", self.progress.step, text, samples=[batch.samples.start, batch.samples.stop])

    def count(self, batch: StepBatch) -> None:
        """Go a step further."""
        self.progress.step += 1
        self.progress.samples += len(batch.samples)
        self.progress.tokens += len(batch.samples) * self.config.train.seq_len

    def due(self, every: int) -> bool:
        """Whether something done every so many steps is due now; always so at the last step."""
        return self.progress.step == self.last or (every > 0 and self.progress.step % every == 0)

    def will_be_due(self, every: int) -> bool:
        """Whether something is due after the coming step that is told in its record."""
        step = self.progress.step + 1
        recorded = step == self.last or step % self.config.metrics.every == 0
        return every > 0 and recorded and (step % every == 0 or step == self.last)

    def take_step(self, batch: StepBatch, agreed: Agreed) -> tuple[StepSums, float]:
        """One step of the engine: its sums, still on the device, and the learning rate."""
        progress = self.progress
        lr = self.peak_lr * lr_share(self.config.lr_schedule, progress.step, total_steps(self.config))
        self.watched = self.engine.watchable and self.will_be_due(self.config.precision.fp8.health_every)
        self.engine.watch(self.watched)
        sums, self.outcome = self.engine.step(batch.micro_batches, agreed.valid_tokens, lr)
        self.count(batch)
        steps, tokens, pairs = self.unrecorded
        read = len(batch.samples) * self.config.train.seq_len
        self.unrecorded = Unrecorded(steps + 1, tokens + read, pairs + agreed.pairs)
        self.unread.append((progress.step, self.outcome))
        return sums, lr

    @contextmanager
    def watching_waits(self, report: Reporter) -> Iterator[None]:
        """One step of a start on CUDA is watched for places where the host waits for the device."""
        if self.machine.device.type != "cuda" or self.progress.step + 1 != self.looks_at:
            yield
            return
        with recorded_waits() as places:
            yield
        for rank, words in enumerate(self.everyone.gather(wait_words(places))):
            if words:
                text = f"in step {self.progress.step} rank {rank} waited for its device, which costs speed: {words}"
                report.event("warning", self.progress.step, text)

    def report_step(
        self, report: Reporter, batch: StepBatch, agreed: Agreed, sums: StepSums, lr: float
    ) -> None:  # fmt: skip
        """Read the device, record the step with the time of those since the last record, and look for skips."""
        config, progress, world = self.config, self.progress, self.everyone.world
        loss, z_square = (each / max(1, agreed.valid_tokens) for each in self.engine.everywhere(sums))
        norm, (steps, tokens, pairs) = self.outcome.grad_norm.item(), self.unrecorded
        seconds, parts = self.clock.finish()
        working = seconds - parts["evaluation"] - parts["checkpoint"]
        imbalance = self.engine.imbalance(batch.micro_batches)
        needed = step_flops(self.shape, tokens, pairs)
        again = recomputed_flops(self.shape, tokens, pairs, config.train.recompute, config.train.recompute_n)
        if self.machine.measured:  # by a busy machine, perhaps: no step is faster than the peak
            self.peak = max(self.peak, (needed + again) / working / world)
        speed = throughput(tokens, needed, again, working, self.peak * world)
        aux = {"z_loss": config.model.z_loss * z_square} if config.model.z_loss else {}
        routed = self.engine.balance.records(len(batch.samples) * config.train.seq_len)
        if config.model.moe is not None:
            aux |= losses(routed, config.model.moe)
        report.step({
            "step": progress.step, "loss": loss, "aux": aux, "grad_norm": norm, "lr": lr,
            "tokens": progress.tokens, "samples": progress.samples, "tokens_per_s": speed.tokens_per_s,
            "mfu": speed.mfu, "hfu": speed.hfu, "step_time": seconds / steps,
            "time": {name: part / steps for name, part in parts.items()},
            "memory_gb": peak_memory_gb(self.machine.device), "skipped": progress.skipped,
            **({"epochs": self.samples.epochs(progress.samples)} if len(self.data.sources) > 1 else {}),
            **({"moe": summary(routed)} if routed else {}),
            **({"cp_imbalance": imbalance} if imbalance is not None else {}),
            **({"fp8": self.engine.fp8_health(self.everyone)} if self.watched else {}),
            **({"loss_scale": self.outcome.loss_scale[0].item()} if self.outcome.loss_scale else {}),
        })  # fmt: skip
        self.unrecorded = Unrecorded()
        self.read_skips(report)

    def read_skips(self, report: Reporter) -> None:
        """Tell of the steps skipped since the last look, and stop the run if too many came in a row.

        A skip that lowers fp16's loss scale is how the scale is found, from an initial one that is too large as after
        each doubling: train.max_skips does not count it. A run that has diverged comes down to precision.fp16.least
        within so many halvings, from where on every skip counts.
        """
        progress, unread, most = self.progress, self.unread, self.config.train.max_skips
        self.unread = []
        for step, outcome in unread:
            if not outcome.skipped.item():
                progress.skipped_in_a_row = progress.hopeless_in_a_row = 0
                continue
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            progress.hopeless_in_a_row += not self.report_skip(report, step, outcome)
            if progress.hopeless_in_a_row >= most:
                raise Diverged(
                    f"{progress.hopeless_in_a_row} steps in a row had gradients that are not finite "
                    f"(train.max_skips={most}); lower optim.lr, or look at what these steps read. "
                    + newest_words(self.config)
                )

    def report_skip(self, report: Reporter, step: int, outcome: StepOutcome) -> bool:
        """Record a skipped step; whether it lowered the loss scale."""
        text = f"step {step} changed nothing: its gradients are not finite"
        if outcome.loss_scale is None:
            report.event("skip", step, text)
            return False
        scale, after = (each.item() for each in outcome.loss_scale)
        change = f"is lowered from {scale:.12g} to" if after < scale else "stays at its least,"
        report.event("skip", step, f"{text}; the loss scale {change} {after:.12g}", loss_scale=after)
        return after < scale

    def evaluate(self, report: Reporter) -> None:
        """Loss on the held-out samples of each source, whatever the micro-batch size and the layout."""
        with self.clock.part("evaluation"):
            sums = [self.engine.evaluate(each.batches) for each in self.held_out]
        self.validation = Validation(self.held_out, sums, self.valid_held_out)
        report.event(
            "validation", self.progress.step, f"validation at step {self.progress.step}: {self.validation.words()}",
            val_loss=self.validation.whole, sources=self.validation.by_source(),
        )  # fmt: skip

    def save_if_sound(self, report: Reporter) -> None:
        """Save, unless the latest steps were skipped: the weights may be past saving, and a good checkpoint is not to
        make room for them. The last step is saved all the same."""
        progress = self.progress
        if progress.skipped_in_a_row and progress.step != self.last:
            text = f"no checkpoint at step {progress.step}: the gradients of the latest steps are not finite"
            report.event("warning", progress.step, text)
        else:
            self.save(report)

    def save(self, report: Reporter) -> None:
        """Write a checkpoint; every process writes what it holds."""
        progress, config = self.progress, self.config
        with self.clock.part("checkpoint"):
            state = RunState(
                progress.step, progress.samples, progress.tokens, self.engine.updater.updates,
                data=self.fingerprints | {each.name: each.fingerprint for each in self.data.sources},
                phases=[asdict(each) for each in self.samples.past(progress.samples)], config=to_dict(config),
                vocab_size=self.shape.vocab_size or 0, choices=self.choices,
                layout=self.layout.words, wandb_id=self.wandb_id,
                tokenizer=next(iter(self.tokenizer_files), self.data.tokenizer),
                tokenizer_fingerprint=self.data.tokenizer_fingerprint, rewound=self.rewound,
            )  # fmt: skip
            path = store.save(
                checkpoint_folder(config), self.engine.pieces(), state,
                keep=0 if progress.skipped_in_a_row else config.checkpoint.keep,
                tokenizer=self.tokenizer_files, everyone=self.everyone,
            )  # fmt: skip
        report.event("checkpoint", progress.step, f"saved {path}", path=str(path))
        if self.leads:
            self.directory.note_step(progress.step, self.attempt)

    def open_reports(self) -> Reporter:
        """The sinks of this start; only the process that leads has any."""
        config, path = self.config, self.directory.path
        if not self.leads:
            return Reporter(self.console, None, None, self.attempt, self.last, total_steps(config))
        wandb = Wandb(config.metrics, path, run_name(config), self.wandb_id, to_dict(config))
        return Reporter(
            self.console, JsonLines(path / "metrics.jsonl"), wandb, self.attempt, self.last, total_steps(config)
        )

    def finish(self, report: Reporter) -> int:
        """Say how good the model is and let it speak; exit code 0.

        Raises:
            Diverged: no step of the run changed anything, or the model gives no finite loss any more.
        """
        whole, say, progress = total_steps(self.config), self.console.say, self.progress
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
            self.say_sample()
        say(f"{state} at step {self.progress.step} of {whole}: {self.directory.path}")
        if self.leads:
            self.directory.finish(state, self.progress.step)
        return 0

    def say_sample(self) -> None:
        """Let the model speak, where one process has all of it."""
        prompt = self.config.train.sample_prompt
        if prompt is None or self.tokenizer is None:
            return
        if self.everyone.world > 1:
            self.console.say(f"for a sample: python -m model.generate {self.directory.path} --prompt {prompt!r}")
            return
        options = {"count": 80, "context": self.config.train.seq_len, "temperature": 0.8, "top_k": 50, "seed": 0}
        self.console.say(f"a sample:\n{continue_text(self.engine.decoder, self.tokenizer, prompt, **options)}")
