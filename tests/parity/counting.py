"""What a rank holds, moves and does in one step, counted on tensors and collectives; runs in spawned ranks."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from unittest.mock import patch

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine
from launch.trial import trial_loader
from metrics.clock import StepClock
from model.transformer import Block
from parallel.device import set_up_machine
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.pipeline import Done
from parallel.process import joined
from parallel.shards import plain


class Moved(TorchDispatchMode):
    """Bytes of the whole message of each collective, by its kind."""

    KINDS: ClassVar = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if name in self.KINDS:
            whole = args[self.KINDS[name]]
            tensors = whole if isinstance(whole, (list, tuple)) else [whole]
            self.bytes[name] += sum(t.nbytes for t in tensors)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Counted:
    """Of one rank in one step."""

    moved: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    order: list[Done] = field(default_factory=list)
    bodies: int = 0
    parameters: int = 0
    gradients: int = 0
    moments: int = 0
    unsharded: int = 0
    accumulated: int = 0
    groups: int = 0
    whole: int = 0
    """Elements of the model's part, unsharded."""
    padded: int = 0
    """The same with every parameter's rows filled up to a multiple of the ranks."""


@contextmanager
def started(ranks, config):
    """An engine, and a function that gives the next step's arguments."""
    device = torch.device("cpu")
    with joined(ranks, device, 60) as everyone:
        machine = set_up_machine("cpu", 0, 1, 1, config.precision, 1.0, "highest", lambda _: None)
        mesh = make_mesh(layout_of(config.parallel, ranks.world), ranks.rank, device, 60)
        yield Engine(config, config.model, mesh, machine, StepClock(device)), mesh, everyone


def one_step(ranks, config, corpus):
    """Counts of the second step (the first one sets things up)."""
    out = Counted()
    body = Block._body

    def counted(self, *args):
        out.bodies += 1
        return body(self, *args)

    with patch.object(Block, "_body", counted), started(ranks, config) as (engine, mesh, everyone):
        batches = list(
            trial_loader(config, corpus, mesh.dp_rank, mesh.layout.dp).steps(0, 2 * config.train.global_batch)
        )
        engine.step(batches[0].micro_batches, 100, 1e-3)
        out.bodies = 0
        agreed = engine.agree(everyone, batches[1], stops=False)
        with Moved() as moved:
            engine.step(batches[1].micro_batches, agreed.valid_tokens, 1e-3, lambda shards: _held(out, engine, shards))
        out.moved, out.calls = dict(moved.bytes), dict(moved.calls)
        out.order = list(engine.pipeline.order) if engine.pipeline else []
        out.moments = sum(plain(t).nbytes for name, t, _ in engine.updater.tensors() if name.startswith("optim."))
    return out


def groups_of(built):
    """FSDP's groups of parameters in one part."""
    root = fully_shard.state(built.zero.module)  # type: ignore[attr-defined]
    return [group for state in root._state_ctx.all_states for group in state._fsdp_param_groups]


def _held(out, engine, shards):
    out.parameters = sum(s.local.nbytes for s in shards)
    out.gradients = sum(s.gradient.nbytes for s in shards)
    for built in engine.parts:
        if built.zero.module is None:
            continue
        for group in groups_of(built):
            out.groups += 1
            for p in group.fsdp_params:
                rows, *rest = p._orig_size
                size = group.mesh_info.mesh.size(-1)
                out.whole += p._orig_size.numel()
                out.padded += -(-rows // size) * size * torch.Size(rest).numel()


def within(ranks, config, corpus):
    """Bytes that are alive beside the shards after the first of several micro-batches: weights and gradients."""
    out = Counted()
    with started(ranks, config) as (engine, mesh, everyone):
        batch = next(trial_loader(config, corpus, mesh.dp_rank, mesh.layout.dp).steps(0, config.train.global_batch))
        engine._begin(batch.micro_batches, 1e-3)
        engine._one(batch.micro_batches[0], last=False)
        engine._one(batch.micro_batches[1], last=False)
        for group in groups_of(engine.parts[0]):
            for p in group.fsdp_params:
                out.whole += p._orig_size.numel()
                weight = getattr(p, "_unsharded_param", None)
                out.unsharded += weight.untyped_storage().nbytes() if weight is not None else 0
                gradient = p.unsharded_accumulated_grad
                out.accumulated += gradient.nbytes if gradient is not None else 0
        everyone.barrier()
    return out


def saved_for_backward(ranks, config, corpus):
    """Bytes of activations that one micro-batch keeps for its backward pass."""
    with started(ranks, config) as (engine, mesh, everyone):
        batch = next(trial_loader(config, corpus, mesh.dp_rank, mesh.layout.dp).steps(0, config.train.global_batch))
        weights = {p.untyped_storage().data_ptr() for built in engine.parts for p in built.decoder.parameters()}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        engine._begin(batch.micro_batches, 1e-3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sums = engine._forward(engine.decoder, None, batch.micro_batches[0])
        sums.objective.backward()
        everyone.barrier()
    return sum(size for size, _ in kept.values())
