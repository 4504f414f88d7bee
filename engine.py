"""A model cut over the ranks, and one training step on it: the same step in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint.pieces import Piece, whole
from conf.precision_rules import te_obstacle
from conf.resolve import ramp_of
from conf.schema import Config
from data.batch import MicroBatch, StepBatch
from feed import FedStage, Feed
from metrics.clock import StepClock
from metrics.fault import Fault, earliest, to_json
from metrics.locator import Sighting, Watcher, Working, is_bad, numbers_of
from metrics.spikes import SpikeWindow
from model.balance import Balance
from model.build import BuildOptions, Built, build_part
from model.config import ModelConfig
from model.flops import squared_lengths
from model.parts import parts_of
from model.transformer import Decoder, LossSums
from optim.loss_scale import LossScale
from optim.updater import StepOutcome, Updater, Watch
from parallel.context import local_places, local_share, unmasked_pairs
from parallel.device import Choice, Machine
from parallel.fp8.choose import choose_backend, with_backend
from parallel.fp8.health import gathered
from parallel.fp8.state import KINDS, set_first_scales, slots_of
from parallel.gradients import finish_gradients
from parallel.mesh import Mesh
from parallel.pipeline import Pipeline, StageParts, Wire
from parallel.process import Everyone
from parallel.schedules import SCHEDULES, schedule_name, stages_per_rank
from parallel.shards import Shard

Inspect = Callable[[Sequence[Shard]], None]
"""Looks at the finished gradients of a step before the update; those of fp16 still have the loss scale in them."""


class StepSums(NamedTuple):
    """Sums over the tokens that this rank's last stage saw (zero where it has none), fp64 scalars."""

    cross_entropy: Tensor
    """Nats."""
    z_square: Tensor
    """logsumexp^2."""


@dataclass(frozen=True)
class Agreed:
    """What all processes know of a step before it is taken."""

    valid_tokens: int
    """Positions with a target, of the whole step: the loss is divided by it."""
    pairs: int
    """Sum of the squared lengths of its attention segments, for its FLOPs."""
    stops: bool
    """Whether somebody asked for an end."""


def _head_weight(decoder: Decoder) -> Tensor:
    """As it is at the moment: FSDP puts others in its place."""
    return decoder.head_weight


def by_layer(name: str) -> tuple[int, str]:
    """Key that sorts names of parameters of blocks by the block's number."""
    return int(name.split(".")[1]), name


class Engine:
    """The parts of the model on this rank, their optimizer, and the order of work on them."""

    def __init__(self, config: Config, shape: ModelConfig, mesh: Mesh, machine: Machine, clock: StepClock) -> None:
        self.config, self.shape, self.mesh, self.machine, self.clock = config, shape, mesh, machine, clock
        parallel, precision = config.parallel, config.precision
        chosen = choose_backend(precision, machine.device, te_obstacle(config)) if precision.in_fp8 else None
        self.products: Choice | None = chosen
        parts = parts_of(shape, parallel, mesh.layout.coordinates(mesh.rank)["pp"])
        options = BuildOptions(
            config.run.seed, machine.device, machine.compute_dtype, machine.master_dtype, parallel.zero,
            config.train.recompute, config.train.recompute_n, config.train.compile, parallel.cp_exchange,
            fp8=with_backend(config.precision, self.products) if self.products else None,
            later=parallel.pp > 1 and SCHEDULES[schedule_name(parallel)].splits,
        )  # fmt: skip
        self.parts: list[Built] = [build_part(shape, part, mesh, options) for _, part in parts]
        self.shards = [each for built in self.parts for each in built.shards]
        self.twin = "embedding.weight" if shape.tied_embeddings and parallel.pp > 1 else None
        fp16 = config.precision.name == "fp16"
        self.loss_scale = LossScale(config.precision.fp16, machine.device) if fp16 else None
        self.updater = Updater(
            self.shards, config.optim, machine.compute_dtype, mesh.layout.world > 1, loss_scale=self.loss_scale
        )
        routers = {number: router for built in self.parts for number, router in built.decoder.routers.items()}
        self.balance = Balance(shape, routers, mesh.layout.world, mesh.layout.world // mesh.layout.pp)
        self.fp8_names: list[str] = []
        self._set_first_scales()
        self.feed, self._backward = Feed(), False
        self.window = SpikeWindow(config.health.window, config.health.sigma, machine.device)
        self.pipeline = self._pipeline([number for number, _ in parts]) if parallel.pp > 1 else None

    def _pipeline(self, numbers: Sequence[int]) -> Pipeline:
        """The stages of this rank under the configured schedule."""
        train, parallel, machine = self.config.train, self.config.parallel, self.machine
        tokens = train.micro_batch * train.seq_len // (self.mesh.layout.tp * self.mesh.layout.cp)
        loss_dtype = torch.promote_types(machine.compute_dtype, torch.float32)
        wire = Wire(tokens, self.shape.hidden, machine.compute_dtype, loss_dtype, machine.device)
        stages = [
            StageParts(number, FedStage(each.decoder, self._forward, self.feed), each.zero, each.later)
            for number, each in zip(numbers, self.parts, strict=True)
        ]
        return Pipeline(
            schedule_name(parallel), stages, parallel.pp * stages_per_rank(parallel), wire,
            self.mesh.axis("pp").group, self.clock.part,
        )  # fmt: skip

    @property
    def micro_batches(self) -> int:
        """Micro-batches that this rank works on in a step of the whole batch."""
        return self.config.train.global_batch // (self.config.train.micro_batch * self.mesh.layout.dp)

    @property
    def micro_batch(self) -> int:
        """Number on this rank of the micro-batch that is worked on, or was last."""
        return self._working().micro_batch

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The blocks on this rank by their numbers in the model."""
        return {int(number): block for built in self.parts for number, block in built.decoder.layers.items()}

    @property
    def decoder(self) -> Decoder:
        """The first part here; all of the model where there is one process."""
        return self.parts[0].decoder

    def _forward(self, decoder: Decoder, x: Tensor | None, batch: MicroBatch, first: bool) -> LossSums | Tensor:
        """One part on one micro-batch; x: activations of the part before, None: the tokens."""
        train, cp = self.config.train, self.mesh.axis("cp")
        *whole, borders = (
            t.to(self.machine.device, non_blocking=True)
            for t in (batch.tokens, batch.labels, batch.positions, batch.cu_seqlens)
        )
        tokens, labels, positions = (local_share(t, train.seq_len, cp) for t in whole)
        fp8, keeps = decoder.cuts.fp8, self.config.parallel.zero < 3  # else weights are freed between micro-batches
        with fp8.forward(first, keeps) if fp8 else nullcontext():
            result: LossSums | Tensor = decoder(
                tokens if x is None else x, labels, positions, borders, train.seq_len,
                documents=self.config.data.document_mask, scale=self.feed.scale,
                share=self.feed.share,
                loss_scale=self.loss_scale.scale if self.loss_scale else None,
            )  # fmt: skip
        return result

    @property
    def watchable(self) -> bool:
        """Whether FP8's operands can be seen: those of Transformer Engine stay inside of it."""
        return self.products is not None and self.products.value == "emulate"

    def watch(self, watching: bool) -> None:
        """Whether the coming step notes how FP8 fares."""
        for built in self.parts:
            if built.fp8 is not None:
                built.fp8.health.begin(watching)

    def fp8_health(self, everyone: Everyone) -> dict[str, Any]:
        """The `fp8` record of the watched step; every rank must ask."""
        own = {name: slot.health for built in self.parts for name, slot in slots_of(built.decoder)}
        if not self.fp8_names:
            self.fp8_names = sorted({n for each in everyone.gather(" ".join(own)) for n in each.split()}, key=by_layer)
        return gathered(own, self.fp8_names, KINDS)

    def agree(self, everyone: Everyone, batch: StepBatch, stops: bool) -> Agreed:
        """Add up what each process knows of the coming step, in one small message."""
        pairs = sum(squared_lengths(m.cu_seqlens, self.shape.window) for m in batch.micro_batches)
        valid, pairs, asked = everyone.add([batch.valid_tokens, pairs, int(stops)])
        same = self.mesh.layout.world // self.mesh.layout.dp  # processes that read the same samples
        return Agreed(valid // same, pairs // same, asked > 0)

    def imbalance(self, micro_batches: Sequence[MicroBatch]) -> float | None:
        """Attention of the busiest context-parallel rank over the mean, in query-key pairs that see each other, of
        this rank's samples; None where sequences are whole."""
        cp, seq_len = self.mesh.layout.cp, self.config.train.seq_len
        if cp == 1:
            return None
        pairs = [unmasked_pairs(m.positions, seq_len, cp, self.shape.window) for m in micro_batches]
        each = [sum(of_rank) for of_rank in zip(*pairs, strict=True)]
        share: float = max(each) * cp / max(1, sum(each))
        return share

    def step(
        self, micro_batches: Sequence[MicroBatch], valid_tokens: int, lr: float, inspect: Inspect | None = None
    ) -> tuple[StepSums, StepOutcome]:
        """Forward and backward of every micro-batch, then the update.

        Args:
            micro_batches: this rank's of the step.
            valid_tokens: of the whole step, on all ranks.
            inspect: called with the finished gradients.
        """
        self._passes(micro_batches, valid_tokens)
        with self.clock.part("grad_sync"):
            finish_gradients(self.shards, self.mesh, self.twin)
            self.balance.gather()
        if inspect is not None:
            inspect(self.shards)
        sums = self._sums()
        with self.clock.part("optimizer"):
            own = sums.cross_entropy / max(1, valid_tokens)
            outcome = self.updater.step(lr, Watch(own, self.window, skips=self.config.health.spike == "skip"))
            self.balance.update(outcome.without_effect)
        for built in self.parts:
            if built.fp8 is not None:
                built.fp8.health.watching = False
        return sums, outcome

    def _passes(self, micro_batches: Sequence[MicroBatch], valid_tokens: int) -> None:
        """Forward and backward of every micro-batch."""
        rows = sum(batch.tokens.numel() for batch in micro_batches) * self.mesh.layout.dp
        self._begin(micro_batches, 1.0 / max(1, valid_tokens), 1.0 / rows)
        self.balance.clear()
        if self.pipeline is not None:
            with self.clock.rest("pipeline_idle"):
                self.pipeline.train(len(micro_batches))
        else:
            for number, batch in enumerate(micro_batches):
                self.feed.number = number
                self._one(batch, first=number == 0, last=number == len(micro_batches) - 1)

    def _begin(self, micro_batches: Sequence[MicroBatch], scale: float, share: float = 1.0) -> None:
        self.feed.micro_batches, self.feed.scale, self.feed.share, self.feed.sums = micro_batches, scale, share, []

    def _loss(self, batch: MicroBatch, first: bool = False) -> LossSums:
        """The whole model, which is one part here, on one micro-batch."""
        sums = self._forward(self.decoder, None, batch, first)
        if not isinstance(sums, LossSums):
            raise ValueError(
                f"{self.decoder.part} ends before the head: a loss comes from a whole model; let the pipeline run parts"
            )
        self.feed.keep(sums)
        return sums

    def _one(self, batch: MicroBatch, first: bool, last: bool) -> None:
        """Forward and backward of one micro-batch through the whole model."""
        self.parts[0].zero.before_backward(last)
        with self.clock.part("forward"):
            sums = self._loss(batch, first)
        with self.clock.part("backward"):
            self._backward = True
            sums.objective.backward()
            self._backward = False

    def _sums(self) -> StepSums:
        """What the last stage saw; of the ranks that saw the same tokens (tp), the first one counts."""
        zero = torch.zeros((), dtype=torch.float64, device=self.machine.device)
        if self.mesh.axis("tp").rank:
            return StepSums(zero, zero)
        return StepSums(
            sum((each.cross_entropy.double() for each in self.feed.sums), zero),
            sum((each.z_square.double() for each in self.feed.sums), zero),
        )

    def everywhere(self, sums: StepSums) -> tuple[float, float]:
        """The sums of all ranks; every rank must ask."""
        both = torch.stack(list(sums))
        if self.mesh.layout.world > 1:
            dist.all_reduce(both)
        cross_entropy, z_square = both.tolist()
        return cross_entropy, z_square

    def locate(
        self, micro_batches: Sequence[MicroBatch], valid_tokens: int, everyone: Everyone,
        loss_scale: Tensor | None = None,
    ) -> Fault | None:  # fmt: skip
        """Where the numbers of a step that changed nothing first were not finite; every rank asks, after the step.

        Its passes are made again, watched, which is slow. Weights, optimizer, scales and the spikes' window stay as
        they are.

        Args:
            micro_batches: this rank's of the step.
            valid_tokens: of the whole step, on all ranks.
            loss_scale: fp16's in that step; a step that changed nothing has lowered it since.

        Returns:
            The same on all ranks; None where all is finite this time, or only what ranks sent each other is not.
        """
        if weight := earliest(everyone.gather(to_json(self._bad_tensor("weights")))):
            return weight
        with self._as_before(loss_scale), torch.compiler.set_stance("force_eager"):
            first = self._watched(micro_batches, valid_tokens)
            own = self._fault(first) if first is not None else None
            finish_gradients(self.shards, self.mesh, self.twin)
            total = self._bad_tensor("backward")
        (sighted,) = everyone.add([int(first is not None)])
        return earliest(everyone.gather(to_json(own if sighted else total)))

    def _watched(self, micro_batches: Sequence[MicroBatch], valid_tokens: int) -> Sighting | None:
        """Make the passes of a step, and look for where they go wrong on this rank."""
        heads = {
            each: ("embedding.weight" if each.head is None else "head.weight", partial(_head_weight, each))
            for each in (built.decoder for built in self.parts)
            if each.part.last
        }
        laters = [built.later for built in self.parts if built.later is not None]
        if self.pipeline is not None:
            self.pipeline.order.clear()
        parts = [built.decoder for built in self.parts]
        with Watcher(parts, self._working, heads, lambda: [each.waiting for each in laters]) as watcher:
            self._passes(micro_batches, valid_tokens)
        return watcher.first

    def _working(self) -> Working:
        """What this rank is at in its passes."""
        if self.pipeline is None:
            return Working(self.feed.number, self._backward)
        kind, _, number = self.pipeline.order[-1] if self.pipeline.order else ("F", 0, 0)
        return Working(number, kind != "F")

    @contextmanager
    def _as_before(self, loss_scale: Tensor | None) -> Iterator[None]:
        """Passes inside leave no trace: neither gradients nor loads nor scales."""
        fp8 = (built for built in self.parts if built.fp8 is not None and built.fp8.delayed)
        slots = [slot for built in fp8 for _, slot in slots_of(built.decoder)]
        states = [{name: tensor.clone() for name, tensor in slot.state().items()} for slot in slots]
        own_scale = None if self.loss_scale is None else self.loss_scale.scale.clone()
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.scale.copy_(loss_scale)
        try:
            yield
        finally:
            for slot, state in zip(slots, states, strict=True):
                for name, tensor in slot.state().items():
                    tensor.copy_(state[name])
            if self.loss_scale is not None and own_scale is not None:
                self.loss_scale.scale.copy_(own_scale)
            self.updater.clear_gradients()
            self.balance.clear()
            self._begin((), 1.0)

    def _bad_tensor(self, passing: Literal["weights", "backward"]) -> Fault | None:
        """The first weight here that is not finite, as products take it; or the first such sum of gradients."""
        for each in self.shards:
            tensor = each.local.to(self.machine.compute_dtype) if passing == "weights" else each.gradient
            if tensor is not None and is_bad(tensor):
                owner, numbers = each.name.rpartition(".")[0], numbers_of(tensor)
                return Fault(self.mesh.rank, passing, owner, each.name, self._layer(owner), None, None, numbers)
        return None

    def _fault(self, seen: Sighting) -> Fault | None:
        """What was seen on this rank, by global names and numbers; None for what came from another."""
        if seen.received:
            return None
        number, backward = seen.working
        batch = self.feed.micro_batches[number]
        row = self._token(batch, *seen.row) if seen.row else None
        sample, position = divmod(row, self.config.train.seq_len) if row is not None else (None, None)
        module = seen.module or ("head" if any(built.decoder.part.last for built in self.parts) else "decoder")
        return Fault(
            self.mesh.rank, "backward" if backward else "forward", module, seen.parameter, self._layer(module),
            number, (batch.samples.start, batch.samples.stop), seen.numbers,
            None if sample is None else batch.samples.start + sample, position, seen.statistics,
        )  # fmt: skip

    def _layer(self, module: str) -> int:
        """Where a module stands: the number of its block, before all of them, or behind."""
        head, _, rest = module.partition(".")
        if head == "layers":
            return int(rest.partition(".")[0])
        return -1 if head == "embedding" else self.shape.layers

    def _token(self, batch: MicroBatch, shape: tuple[int, ...], first: int) -> int | None:
        """Place in the micro-batch's whole sequences of the token that element `first` of an activation belongs to;
        None for a tensor that has no rows of tokens."""
        tp, cp, seq_len = self.mesh.axis("tp"), self.mesh.axis("cp"), self.config.train.seq_len
        rows = batch.tokens.numel() // cp.size
        for axes in range(1, len(shape)):
            leading = prod(shape[:axes])
            if leading in (rows // tp.size, rows):
                row = first // prod(shape[axes:]) + (tp.rank * leading if leading < rows else 0)
                sample, at = divmod(row, seq_len // cp.size)
                return sample * seq_len + int(local_places(seq_len, cp)[at])
        return None

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[MicroBatch]]) -> float:
        """Sum of cross-entropies over held-out micro-batches, given in groups of one step's count, on all ranks."""
        total = StepSums(*torch.zeros(2, dtype=torch.float64, device=self.machine.device))
        for group in batches:
            self._begin(group, 1.0)
            if self.pipeline is not None:
                self.pipeline.evaluate(len(group))
            else:
                for batch in group:
                    self._loss(batch)
            total = StepSums(*(a + b for a, b in zip(total, self._sums(), strict=True)))
        return self.everywhere(total)[0]

    def pieces(self) -> Mapping[str, Piece]:
        """Everything a checkpoint keeps of this rank, by layout-free name; filling a piece fills the optimizer."""
        pieces: dict[str, Piece] = {}
        for name, piece in self._pieces():
            pieces.setdefault(name, piece)
        return pieces

    def resume(self, updates: int) -> None:
        """Go on from what was filled into `pieces()`, after as many updates."""
        first: dict[str, Tensor] = {}
        for name, tensor, _ in self.updater.tensors():
            known = first.setdefault(name, tensor)
            if known is not tensor:  # a table that two stages of this rank hold
                tensor.copy_(known)
        self.updater.resume(updates)

    def begin_with_weights(self) -> None:
        """Begin with weights that were filled into `pieces()`, and nothing else of a run."""
        self.resume(0)
        self._set_first_scales()

    def _set_first_scales(self) -> None:
        """FP8's scales before the first step, from the weights."""
        for built in self.parts:
            if built.fp8 is not None and built.fp8.delayed:
                set_first_scales(built.decoder, ramp_of(self.config).sizes[0] * self.config.train.seq_len)

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, tensor, shard in self.updater.tensors():
            yield name, Piece(tensor, shard.shape, shard.start, shard.writes)
        for name, bias in self.balance.state():
            yield name, replace(whole(bias), writes=self.first_of_stage)
        for name, value in self.loss_scale.state() if self.loss_scale else ():
            yield name, replace(whole(value), writes=self.mesh.rank == 0)
        yield "health.window", replace(whole(self.window.state), writes=self.mesh.rank == 0)
        for built in self.parts:
            if built.fp8 is not None and built.fp8.delayed:
                yield from self._scales(built.decoder)

    def _scales(self, decoder: Decoder) -> Iterator[tuple[str, Piece]]:
        """Histories and scales of FP8: those of dense linears are whole everywhere, those of experts cut over ep."""
        ep, places = self.mesh.axis("ep"), self.mesh.expert.places
        alone = places["edp_replicate"] == places["edp_shard"] == 0
        for name, slot in slots_of(decoder):
            for kind, tensor in slot.state().items():
                piece = whole(tensor)
                if slot.expert:
                    shape, start = (slot.count * ep.size, *tensor.shape[1:]), (slot.count * ep.rank,)
                    piece = Piece(tensor, shape, (*start, *(0,) * (tensor.dim() - 1)))
                yield f"fp8.{kind}.{name}", replace(piece, writes=alone if slot.expert else self.first_of_stage)

    @property
    def first_of_stage(self) -> bool:
        """Whether this rank is the first of those that hold the same layers."""
        at = self.mesh.layout.coordinates(self.mesh.rank)
        return not any(place for axis, place in at.items() if axis != "pp")
