"""One start of a run on one process: find where to go on, make data ready, join the others, build; then the loop."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack

from assembly import Assembly, Surroundings
from checkpoint.agreement import Damaged
from conf.resolve import run_directory, run_name, to_yaml, total_steps
from conf.schema import Config
from data.ready import ready
from loop import Loop
from metrics.follower import Follower
from metrics.goodput import Goodput, process_began
from metrics.rank_log import rank_log
from metrics.run_directory import RunDirectory
from metrics.sinks import Console
from metrics.stop_request import StopRequest
from parallel.device import local_device
from parallel.garbage import collecting
from parallel.process import joined
from parallel.ranks import find_ranks
from start import Saved, find_saved, folders_of, last_step, require_one_task, task_text, tokenizer_of


def run(config: Config, overrides: list[str]) -> int:
    """One start of a run on this process: find where to go on, make data ready, join the others, build, train."""
    ranks = find_ranks(os.environ)
    leads = ranks.rank == 0
    directory, console = RunDirectory(run_directory(config)), Console(silent=not leads)
    if (code := directory.ended_for_good(os.environ)) is not None:
        print(f"the run has ended with {code}; it is not started again", file=sys.stderr)
        return code
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
            if leads:
                directory.prepare(saved.state.step if saved else 0)
                console.open_log(directory.path / "log.txt")
            everyone.barrier()
            with rank_log(directory.path / "logs", ranks.rank):
                attempt = int(everyone.gather(str(directory.status().get("attempt", 1)))[0])
                around = Surroundings(config, data, directory, console, ranks, everyone, attempt)
                return _train_from(around, saved, overrides)


def _train_from(around: Surroundings, saved: Saved | None, overrides: list[str]) -> int:
    """Train; where a checkpoint's tensors turn out to be damaged, from the one before it. The exit code."""
    config, unsound = around.config, list[Damaged]()
    while True:
        try:
            assembly = Assembly(around, saved)
            if assembly.leads:  # a start that was refused leaves no word of its settings
                words = f"{around.ranks.world} by {around.ranks.source}: {assembly.layout.words}"
                around.directory.record(to_yaml(config), overrides, words)
            return _train(assembly)
        except Damaged as damage:
            if damage.path.parent not in folders_of(config).all:
                raise  # another run's, which was asked for by name
            unsound.append(damage)
        saved = find_saved(config, around.console, unsound)
        around.everyone.require_same("where they go on", str(saved.path if saved else None))


def _train(assembly: Assembly) -> int:
    """Open what has to be closed, and train to the last step of this start; the exit code."""
    config, directory = assembly.config, assembly.directory
    with ExitStack() as stack:
        stop = stack.enter_context(_stop_request(assembly).listening())
        ledger = Goodput(directory.path / "metrics.jsonl", process_began()) if assembly.leads else None
        report = stack.enter_context(assembly.open_reports())
        stack.enter_context(assembly.loader)
        saving = stack.enter_context(assembly.open_saving(report))
        stack.enter_context(assembly.watchdog)
        collect = stack.enter_context(collecting(config.train.gc_every))
        return Loop(assembly, stop, report, saving, assembly.open_watching(report, saving), ledger, collect).train()


def _stop_request(assembly: Assembly) -> StopRequest:
    """What asks this process for an end; train.max_hours counts from the start of the process."""
    file, hours = assembly.directory.stop_file if assembly.leads else None, assembly.config.train.max_hours
    if hours is None:
        return StopRequest(file)
    left = hours * 3600.0 - (time.time() - process_began())
    return StopRequest(file, time.monotonic() + left, f"train.max_hours={hours:g}")
