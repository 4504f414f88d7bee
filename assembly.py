"""What one start of a run is made of on this process: the engine, its data and its reports."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from announce import announce_products, announce_schedule, announce_slow_experts, announce_start
from checkpoint import store
from checkpoint.folder import locate
from conf.resolve import run_name, to_dict, total_steps
from conf.schema import Config
from data.ready import ReadyData
from data.tokenizers.tokenizer import load_tokenizer
from engine import Engine
from faults import FaultFiles
from metrics.clock import StepClock
from metrics.inject import Injector
from metrics.reporter import Reporter
from metrics.run_directory import RunDirectory
from metrics.sinks import Console, JsonLines, Wandb
from metrics.stragglers import Stragglers, Work
from metrics.watchdog import Watchdog
from model.flops import inactive_parameters
from model.generate import continue_text
from model.transformer import count_parameters
from optim.schedule import peak_lr
from parallel.device import Machine, set_up_machine
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.process import Everyone
from parallel.ranks import Ranks
from reading import Share, open_held_out, open_loader, open_samples
from recording import Progress
from saving import Constants, Saving
from start import Saved, begins_anew, folders_of, last_step, unlike_window
from watching import Watching


@dataclass(frozen=True)
class Surroundings:
    """What this process has before there is a model."""

    config: Config
    """Of the run."""
    data: ReadyData
    """Made ready."""
    directory: RunDirectory
    """Of the run."""
    console: Console
    """Says something on the process that leads."""
    ranks: Ranks
    """This process among all."""
    everyone: Everyone
    """All of them."""
    attempt: int
    """How many times the run has been started."""


class Assembly:
    """The engine, its data and its reports on this process, made to go on from a checkpoint or to begin."""

    def __init__(self, around: Surroundings, saved: Saved | None) -> None:
        self.config, self.data, self.directory = around.config, around.data, around.directory
        self.console, self.everyone, self.attempt, self.saved = around.console, around.everyone, around.attempt, saved
        self.leads, self.layout = self.everyone.rank == 0, layout_of(self.config.parallel, self.everyone.world)
        config, say = self.config, self.console.say
        self.shape = replace(config.model, vocab_size=config.model.vocab_size or self.data.vocab_size)
        begin = saved.state.step if saved else None
        announce_start(config, self.shape, self.layout, around.ranks, begin, self.attempt, say)
        self.machine = self.set_up(around.ranks)
        self.injector = Injector(config.debug, self.everyone.rank, self.attempt, _say_at_once)
        self.work = Work()
        self.watchdog = Watchdog(
            config.health.limits, self.directory, self.everyone.rank, self.everyone.world, self.attempt
        )
        self.clock = StepClock(self.machine.device, (self.watchdog, self.work, self.injector))
        self.engine = self.build()
        self.injector.poison(self.engine.layers, lambda: self.engine.micro_batch)
        announce_slow_experts(config, self.machine, say)
        self.open_data()
        self.tokenizer_files = self.data.tokenizer_files()  # now: a checkpoint that it is read from may be pruned
        named = self.data.tokenizer if config.train.sample_prompt is not None else None
        self.tokenizer = load_tokenizer(named, lambda _: None) if named is not None else None
        self.peak_lr = peak_lr(config.optim, config.model.hidden)
        announce_schedule(config, self.peak_lr, say)
        own = saved is not None and saved.path.parent in folders_of(config).all  # else it is another run's
        kept = saved.state.wandb_id if saved and own else None
        self.wandb_id = self.directory.wandb_id(kept) if self.leads else ""
        self.progress = Progress()
        if saved is not None:
            self.load(saved)
        elif config.checkpoint.load is not None:
            self.load_weights(locate(Path(config.checkpoint.load).expanduser()))

    def set_up(self, ranks: Ranks) -> Machine:
        """Device, threads and products; how fp32 products are made is rank 0's choice for all."""

        def choose(matmul: str | None) -> Machine:
            config = self.config
            return set_up_machine(
                config.train.device, ranks.local_rank, config.train.threads, ranks.local_world,
                config.precision, config.metrics.peak_tflops, matmul, self.console.say,
            )  # fmt: skip

        state = self.saved.state if self.saved else None
        was_fp32 = state is not None and state.config.get("precision", {}).get("name") == "fp32"
        kept = state.choices.get("matmul") if state and was_fp32 else None
        machine = choose(kept) if self.leads else None
        chosen = self.everyone.gather(machine.matmul if machine else "")[0]
        machine = machine or choose(chosen)
        self.everyone.require_same("how fp32 products are made", machine.matmul)
        return machine

    def build(self) -> Engine:
        """The model on this rank, and its optimizer."""
        config, everyone = self.config, self.everyone
        mesh = make_mesh(
            self.layout, everyone.rank, self.machine.device, config.parallel.timeout,
            experts=config.model.moe is not None, maxima=config.precision.name == "fp8_delayed",
        )  # fmt: skip
        engine = Engine(config, self.shape, mesh, self.machine, self.clock)
        self.choices = {"matmul": self.machine.matmul}
        if (products := engine.products) is not None:
            everyone.require_same("who makes FP8 products", products.value)
            self.choices["fp8"] = products.value
            before = self.saved.state.choices.get("fp8") if self.saved else None
            announce_products(products, self.machine, before, self.console.say)
        return engine

    def open_data(self) -> None:
        """The samples of the run, this process's loader of them, and its held-out sequences."""
        config, say, everyone = self.config, self.console.say, self.everyone
        count, unused = count_parameters(self.shape), inactive_parameters(self.shape)
        used = f", of which a token uses {count - unused:,}" if unused else ""
        say(f"model: {config.model.name}, {count:,} parameters{used}")
        share = Share(
            self.shape.vocab_size or 0, self.engine.mesh.dp_rank, self.layout.dp,
            group=self.engine.micro_batches if config.parallel.pp > 1 else 1, pin=self.machine.device.type == "cuda",
        )  # fmt: skip
        self.samples = open_samples(config, self.data, self.saved.state if self.saved else None, say)
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
        fresh += unlike_window(self.config, saved)
        store.load(saved.path, self.engine.pieces(), everyone=self.everyone, fresh=fresh)
        self.engine.resume(state.updates)
        self.progress.step, self.progress.samples, self.progress.tokens = state.step, state.samples, state.tokens

    def load_weights(self, path: Path) -> None:
        """Begin with a checkpoint's weights; all else begins anew."""
        exceptions = self.config.checkpoint.load_except
        kept, unread = store.load_weights(path, self.engine.pieces(), exceptions, self.everyone)
        self.engine.begin_with_weights()
        self.console.say(f"the weights of {path} are where this run begins")
        if kept:
            self.console.say(f"  not from there, as checkpoint.load_except says: {', '.join(kept)}")
        if unread:
            self.console.say(f"  not read of it: {', '.join(unread)}")

    def open_saving(self, report: Reporter) -> Saving:
        """The checkpoints of this start."""
        state = self.saved.state if self.saved else None
        constants = Constants(
            self.shape.vocab_size or 0, self.choices, self.layout.words, self.wandb_id, state.data if state else {},
            self.tokenizer_files,
        )  # fmt: skip
        saving = Saving(
            self.config, constants, self.engine, self.data, self.samples, self.everyone, self.clock, self.injector,
            report, self.note_step if self.leads else lambda step: None,
        )  # fmt: skip
        if self.saved:
            saving.rewound = [*self.saved.state.rewound, *([self.saved.state.step] if self.saved.rewinds else [])]
        return saving

    def open_watching(self, report: Reporter, saving: Saving) -> Watching:
        """What looks at the outcomes of steps."""
        layout = self.layout
        peers = [
            layout.coordinates(rank)["pp"] * layout.ep + layout.expert_coordinates(rank)["ep"]
            for rank in range(self.everyone.world)
        ]
        stragglers = Stragglers(self.config.health.straggler, self.everyone.rank, platform.node(), peers)
        faults = FaultFiles(self.directory.path / "faults", self.engine, self.everyone, self.clock, saving.state)
        return Watching(self.config, self.engine, self.everyone, report, stragglers, faults, self.work.take)

    def note_step(self, step: int) -> None:
        """A checkpoint of this step is whole."""
        self.directory.note_step(step, self.attempt)

    def open_reports(self) -> Reporter:
        """The sinks of this start; only the process that leads has any."""
        config, path = self.config, self.directory.path
        if not self.leads:
            return Reporter(self.console, None, None, self.attempt, last_step(config), total_steps(config))
        wandb = Wandb(config.metrics, path, run_name(config), self.wandb_id, to_dict(config))
        return Reporter(
            self.console, JsonLines(path / "metrics.jsonl"), wandb, self.attempt, last_step(config), total_steps(config)
        )

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


def _say_at_once(text: str) -> None:
    """Print before anything can end the process."""
    print(text, flush=True)
