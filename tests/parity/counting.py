"""What a rank holds, moves and does in one step, counted on tensors and collectives; runs in spawned ranks."""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch.distributed.fsdp import fully_shard

from engine import Engine
from launch.trial import trial_steps
from metrics.clock import StepClock
from model.transformer import Block
from parallel.device import set_up_machine
from parallel.exchange import DirectGather, DirectReduceScatter
from parallel.layout import layout_of
from parallel.mesh import make_mesh
from parallel.pipeline import Done
from parallel.process import joined
from parallel.shards import plain
from tests.parallel.kept import kept_bytes


@contextmanager
def moved(out):
    """Count the whole message of each of FSDP's gathers and reductions."""
    gather, reduce = DirectGather.__call__, DirectReduceScatter.__call__

    def gathered(self, output_tensor, input_tensor, group, async_op=False):
        out.gathered, out.gathers = out.gathered + output_tensor.nbytes, out.gathers + 1
        gather(self, output_tensor, input_tensor, group, async_op)

    def reduced(self, output_tensor, input_tensor, group, op, async_op=False):
        out.reduced, out.reductions = out.reduced + input_tensor.nbytes, out.reductions + 1
        reduce(self, output_tensor, input_tensor, group, op, async_op)

    with patch.object(DirectGather, "__call__", gathered), patch.object(DirectReduceScatter, "__call__", reduced):
        yield


@dataclass
class Counted:
    """Of one rank in one step."""

    gathered: int = 0
    gathers: int = 0
    reduced: int = 0
    reductions: int = 0
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
def started(ranks, config, exact=False):
    """An engine; `exact`: in fp64 but for what is rounded to FP8."""
    device = torch.device("cpu")
    with joined(ranks, device, 60) as everyone:
        machine = set_up_machine("cpu", 0, 1, 1, config.precision, 1.0, "highest", lambda _: None)
        if exact:
            machine = replace(machine, compute_dtype=torch.float64, master_dtype=torch.float64)
        layout = layout_of(config.parallel, ranks.world)
        mesh = make_mesh(
            layout, ranks.rank, device, 60,
            experts=config.model.moe is not None, maxima=config.precision.name == "fp8_delayed",
        )  # fmt: skip
        yield Engine(config, config.model, mesh, machine, StepClock(device)), mesh, everyone


def one_step(ranks, config, corpus):
    """Counts of the second step (the first one sets things up)."""
    out = Counted()
    body = Block._body

    def counted(self, *args):
        out.bodies += 1
        return body(self, *args)

    with patch.object(Block, "_body", counted), started(ranks, config) as (engine, mesh, everyone):
        batches = list(trial_steps(config, corpus, 2, mesh.dp_rank, mesh.layout.dp))
        engine.step(batches[0].micro_batches, 100, 1e-3)
        out.bodies = 0
        agreed = engine.agree(everyone, batches[1], stops=False)
        with moved(out):
            engine.step(batches[1].micro_batches, agreed.valid_tokens, 1e-3, lambda shards: _held(out, engine, shards))
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
        batch = next(trial_steps(config, corpus, 1, mesh.dp_rank, mesh.layout.dp))
        engine._begin(batch.micro_batches, 1e-3)
        engine._one(batch.micro_batches[0], first=True, last=False)
        engine._one(batch.micro_batches[1], first=False, last=False)
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
        batch = next(trial_steps(config, corpus, 1, mesh.dp_rank, mesh.layout.dp))
        results = []

        def run():
            engine._begin(batch.micro_batches, 1e-3)
            results.append(engine._forward(engine.decoder, None, batch.micro_batches[0], True))
            return results[-1].objective

        run().backward()  # what FSDP and messages hold from the first pass on is no activation
        results.clear()
        engine.updater.clear_gradients()
        kept = kept_bytes(run)
        results[-1].objective.backward()
        everyone.barrier()
    return kept
