"""What `benchmarks.gpu_check` measures with the real engine: parity with a CPU, speed, checkpoints, host syncs.

A section is a generator of figures, so that those made before a failure are kept.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from conf.schema import Config, RunConfig, TrainConfig
from data.batch import StepBatch
from data.config import DataConfig
from engine import Engine
from launch.trial import trial_steps, write_trial_corpus
from metrics.clock import StepClock
from metrics.throughput import throughput
from model.config import ModelConfig, MoEConfig, RopeScaling
from model.flops import squared_lengths, step_flops
from model.transformer import count_parameters
from optim.config import OptimConfig
from optim.schedule import lr_share, peak_lr
from optim.updater import StepOutcome
from parallel.device import set_up_machine
from parallel.mesh import ONE_PROCESS
from parallel.precision import PrecisionConfig
from parallel.process import Everyone
from parallel.shards import Shard
from parallel.waits import recorded_waits

STEPS = 20  # of a comparison
FALLS = 0.95  # most of the first loss that may be left after them: what does not train proves nothing
STATE_BYTES = 14.5  # a parameter: bf16 weight 2, fp32 master 4, moments 8, and a little for what is no weight
COMPILED = 5e-3  # relative difference of the first loss, in bf16
MFU = {"eager": 0.2, "compiled": 0.25}  # least share of the published peak, 1b, micro-batch 1
SYNCS = 0.0  # most waits for the device in a bf16 step: all that a step decides is decided on the device

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Figure:
    """One number of a section."""

    name: str
    """What it is."""
    value: float
    """How much."""
    unit: str = ""
    """Of the value and the limit; a ratio has none."""
    limit: float | None = None
    """Where it fails; None: it only informs."""
    sense: Literal["<=", ">="] = "<="
    """On which side of the limit it must be."""

    @property
    def passed(self) -> bool:
        """Within its limit, and a number."""
        if not math.isfinite(self.value):
            return False
        if self.limit is None:
            return True
        return self.value <= self.limit if self.sense == "<=" else self.value >= self.limit


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly to look."""

    device: torch.device
    """What is checked."""
    quick: bool = False
    """Small shapes and few repetitions."""

    @property
    def on_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences from a CPU in fp32, over all steps."""

    loss: float
    """Of a step's loss."""
    norm: float
    """Of its gradient norm."""


# fp32 differs by the order of additions, which AdamW enlarges where gradients are near zero; a router's choice that
# rounding turns around moves a token to another expert. bf16 is held to what rounding on a CPU amounts to (1.6e-3 and
# 4.1e-2 at most), times three.
PARITY: dict[tuple[str, Precision], Tolerance] = {
    ("dense", "fp32"): Tolerance(loss=2e-5, norm=5e-4),
    ("dense", "bf16"): Tolerance(loss=5e-3, norm=1e-1),
    ("mixture", "fp32"): Tolerance(loss=1e-3, norm=1e-2),
    ("mixture", "bf16"): Tolerance(loss=5e-3, norm=1.5e-1),
}

# conf/model/1b.yaml, spelled out so that nothing but torch is needed to read it; a test compares the two.
ONE_B = ModelConfig(
    name="1b", hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, tied_embeddings=True, rope_theta=500000.0,
    rope_scaling=RopeScaling(factor=32.0), vocab_size=128256,
)  # fmt: skip
SEQ_LEN = 4096  # tokens, of the speed of the 1b shape


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Mean time of `work`, the device's included, after one pass that is not counted."""
    work()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / times


def cpu_threads() -> int:
    """Few: small products gain nothing from more, and wait for each other where the cores are shared."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def release() -> None:
    """Free what the last model held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def small(kind: str, precision: Precision, quick: bool) -> Config:
    """A model of the trial's corpus that takes milliseconds a step; kind: dense or mixture."""
    hidden, layers, seq_len = (64, 2, 64) if quick else (256, 4, 256)
    moe = MoEConfig(experts=8, top_k=2, ffn=hidden // 2) if kind == "mixture" else None
    shape = ModelConfig(
        name=kind, hidden=hidden, layers=layers, heads=4, kv_heads=2, ffn=3 * hidden, moe=moe, vocab_size=512
    )
    train = TrainConfig(steps=STEPS, global_batch=8, micro_batch=4, seq_len=seq_len)
    optim = OptimConfig(lr=2e-3)  # a high one would make differences grow, whatever they come from
    return Config(run=RunConfig(seed=1), train=train, model=shape, precision=PrecisionConfig(precision), optim=optim)


@contextmanager
def trial_corpus(config: Config, steps: int) -> Iterator[list[StepBatch]]:
    """The batches of some steps, read by the run's own loader."""
    train = config.train
    with tempfile.TemporaryDirectory() as folder:
        tokens = (steps * train.global_batch + 2) * train.seq_len
        corpus = write_trial_corpus(Path(folder) / "corpus", config.model.vocab_size or 0, tokens)
        yield list(trial_steps(config, corpus, steps))


def made(config: Config, device: torch.device, peak: float | None = 1.0) -> Engine:
    """The engine of one process, set up as a run sets it up; fp32 products are fp32 (no TF32)."""
    machine = set_up_machine(device.type, 0, cpu_threads(), 1, config.precision, peak, "highest", lambda _: None)
    return Engine(config, config.model, ONE_PROCESS, machine, StepClock(machine.device))


def step(
    engine: Engine, batch: StepBatch, lr: float, inspect: Callable[[Sequence[Shard]], None] | None = None
) -> tuple[torch.Tensor, StepOutcome]:
    """One step: its loss in nats a token and its outcome, both still on the device."""
    agreed = engine.agree(Everyone(), batch, stops=False)
    sums, outcome = engine.step(batch.micro_batches, agreed.valid_tokens, lr, inspect)
    return sums.cross_entropy / agreed.valid_tokens, outcome


@dataclass(frozen=True)
class Curve:
    """How a model learnt."""

    losses: tuple[float, ...]
    """Of each step, nats a token."""
    norms: tuple[float, ...]
    """Gradient norm of each step."""


def curve(config: Config, batches: Sequence[StepBatch], device: torch.device) -> Curve:
    """Train on the batches."""
    engine, peak = made(config, device), peak_lr(config.optim, config.model.hidden)
    pairs = [
        step(engine, batch, peak * lr_share(config.lr_schedule, number, len(batches)))
        for number, batch in enumerate(batches)
    ]
    return Curve(tuple(loss.item() for loss, _ in pairs), tuple(outcome.grad_norm.item() for _, outcome in pairs))


def apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest relative difference; what is no number stays none."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return math.nan if any(math.isnan(each) for each in differences) else max(differences)


def parity(setting: Setting) -> Iterator[Figure]:
    """The device in fp32 and bf16 against a CPU in fp32, on documents."""
    for kind in ("dense", "mixture"):
        config = small(kind, "fp32", setting.quick)
        with trial_corpus(config, STEPS) as batches:
            wanted = curve(config, batches, torch.device("cpu"))
            yield Figure(f"{kind}: last loss / first loss on the CPU", wanted.losses[-1] / wanted.losses[0], "", FALLS)
            for precision in ("fp32", "bf16"):
                limits = PARITY[kind, precision]
                found = curve(replace(config, precision=PrecisionConfig(precision)), batches, setting.device)
                label = f"{kind} {precision}: largest difference of"
                yield Figure(f"{label} the loss", apart(found.losses, wanted.losses), "", limits.loss)
                yield Figure(f"{label} the norm", apart(found.norms, wanted.norms), "", limits.norm)


def bytes_needed(shape: ModelConfig, tokens: int) -> float:
    """Rough memory of a bf16 training step: what a parameter costs, blocks' activations, the loss.

    A parameter has 18 bytes, its fp32 gradient included; a token keeps some ten times hidden and four times ffn
    in bf16 a block; the table's gradient exists up to four times, a chunk's logits in bf16 and twice in fp32.
    """
    vocabulary = shape.vocab_size or 0
    activations = 2 * tokens * shape.layers * (10 * shape.hidden + 4 * shape.ffn)
    loss = vocabulary * (4 * 4 * shape.hidden + 10 * shape.loss_chunk)
    return 18.0 * count_parameters(shape) + activations + loss


def fitting(shape: ModelConfig, tokens: int, free: float) -> ModelConfig:
    """The shape with as many layers as fit into `free` bytes, one at least."""
    for layers in range(shape.layers, 1, -1):
        if bytes_needed(replace(shape, layers=layers), tokens) <= free:
            return replace(shape, layers=layers)
    return replace(shape, layers=1)


def speed_config(setting: Setting) -> Config:
    """The 1b shape at 4,096 tokens on a GPU, whole sequences; on a CPU something tiny of the same kind."""
    if setting.on_cuda:
        shape, seq_len = fitting(ONE_B, SEQ_LEN, 0.9 * torch.cuda.mem_get_info(setting.device)[0]), SEQ_LEN
    else:
        shape, seq_len = replace(ONE_B, hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab_size=512), 256
    train = TrainConfig(steps=STEPS, global_batch=1, micro_batch=1, seq_len=seq_len)
    data = DataConfig(document_mask=False)
    return Config(train=train, model=shape, data=data, precision=PrecisionConfig("bf16"))


def speed(setting: Setting) -> Iterator[Figure]:
    """Step time, tokens/s, MFU and memory in bf16, eager and compiled."""
    config, steps = speed_config(setting), 3 if setting.quick else 10
    yield Figure(f"layers (of {ONE_B.layers})", config.model.layers)
    yield Figure("parameters", count_parameters(config.model) / 1e6, "M")
    yield Figure("sequence", config.train.seq_len, "tokens")
    with trial_corpus(config, steps + 3) as batches:
        release()
        eager = yield from measured(config, batches, setting, "eager")
        if setting.quick and not setting.on_cuda:  # compiling takes a CPU longer than all the rest
            return
        release()
        config = replace(config, train=replace(config.train, compile=True))
        compiled = yield from measured(config, batches, setting, "compiled")
    yield Figure("first loss: compiled against eager", apart([compiled], [eager]), "", COMPILED)


def measured(
    config: Config, batches: Sequence[StepBatch], setting: Setting, label: str
) -> Generator[Figure, None, float]:
    """Figures of one engine, and its first loss; two steps are not timed, of a third the memory is read."""
    engine, lr, device = made(config, setting.device, None), 1e-4, setting.device
    begin = time.perf_counter()
    loss = step(engine, batches[0], lr)[0].item()
    yield Figure(f"{label}: first step, compilation included", time.perf_counter() - begin, "s")
    yield Figure(f"{label}: first loss", loss, "nats")
    step(engine, batches[1], lr)
    if setting.on_cuda:
        yield from _memory(engine, batches[2], label)
    rest = batches[3:]
    synchronize(device)
    begin = time.perf_counter()
    for batch in rest:
        step(engine, batch, lr)
    synchronize(device)
    seconds = (time.perf_counter() - begin) / len(rest)
    pairs = sum(squared_lengths(m.cu_seqlens, config.model.window) for m in rest[0].micro_batches)
    flops = step_flops(config.model, rest[0].tokens, pairs)
    fast = throughput(rest[0].tokens, flops, 0, seconds, engine.machine.peak)
    yield Figure(f"{label}: step", 1e3 * seconds, "ms")
    yield Figure(f"{label}: tokens/s", fast.tokens_per_s)
    yield Figure(f"{label}: speed", flops / seconds / 1e12, "TFLOP/s")
    whole = setting.on_cuda and config.model.layers == ONE_B.layers and not engine.machine.measured
    yield Figure(f"{label}: MFU", fast.mfu, "", MFU.get(label) if whole else None, ">=")
    return loss


def _memory(engine: Engine, batch: StepBatch, label: str) -> Iterator[Figure]:
    """What one step holds, by kind."""
    device, at_end = engine.machine.device, [0]

    def look(_: Sequence[Shard]) -> None:
        at_end[0] = torch.cuda.memory_allocated(device)

    synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(engine, batch, 1e-4, look)
    synchronize(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    yield Figure(f"{label}: weights and optimizer", held / 1e9, "GB")
    parameters = sum(math.prod(each.shape) for each in engine.shards)
    yield Figure(f"{label}: weights and optimizer a parameter", held / parameters, "bytes", STATE_BYTES)
    yield Figure(f"{label}: gradients at the end of the backward pass", (at_end[0] - held) / 1e9, "GB")
    yield Figure(f"{label}: peak of activations and gradients", (peak - held) / 1e9, "GB")
    yield Figure(f"{label}: peak of all", peak / 1e9, "GB")
    yield Figure(f"{label}: reserved", reserved / 1e9, "GB")


def checkpoint_stall(setting: Setting) -> Iterator[Figure]:
    """How long training stands while a checkpoint is written, and that it holds what was saved."""
    from checkpoint import store  # safetensors, which no other section needs

    config = small("dense", "bf16", setting.quick)
    with trial_corpus(config, 1) as batches, tempfile.TemporaryDirectory() as folder:
        engine = made(config, setting.device)
        step(engine, batches[0], 1e-3)
        pieces, seconds, path = engine.pieces(), [], Path(folder)
        for number in range(1, 4):
            state = store.RunState(number, 0, 0, 1, data={}, config={}, vocab_size=config.model.vocab_size or 0)
            synchronize(setting.device)
            begin = time.perf_counter()
            path = store.save(Path(folder) / "checkpoints", pieces, state, keep=store.Retention(1))
            seconds.append(time.perf_counter() - begin)
        saved = {name: piece.local.detach().clone() for name, piece in pieces.items()}
        size = sum(each.numel() * each.element_size() for each in saved.values())
        with torch.no_grad():
            for piece in pieces.values():
                piece.local.zero_()
        store.load(path, pieces)
        differ = sum(not torch.equal(piece.local, saved[name]) for name, piece in pieces.items())
    stall = statistics.median(seconds)
    yield Figure("checkpoint", size / 1e6, "MB")
    yield Figure("stall", stall, "s")
    yield Figure("rate", size / 1e6 / stall, "MB/s")
    yield Figure("tensors that differ after reading back", differ, "", 0)


def host_syncs(setting: Setting) -> Iterator[Figure]:
    """Where a bf16 step waits for the device, by place in the project; reading the loss afterwards is not of it."""
    steps = 3
    for kind in ("dense", "mixture"):
        config = small(kind, "bf16", setting.quick)
        with trial_corpus(config, 2 + steps) as batches:
            engine = made(config, setting.device)
            for batch in batches[:2]:
                step(engine, batch, 1e-3)
            with recorded_waits() as places:
                for batch in batches[2:]:
                    step(engine, batch, 1e-3)
        yield Figure(f"{kind}: host syncs a step", places.total() / steps, "", SYNCS)
        for place, count in places.most_common():
            yield Figure(f"{kind}: of these at {place}", count / steps)
