"""From a configuration to a decoder with weights: meta -> cut -> shard -> materialise -> initialise.

A rank computes the initial values of its own rectangles alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from model.compiled import compile_regions
from model.config import ModelConfig
from model.init import fill_rectangle, stream_key
from model.moe import MoE
from model.transformer import Decoder, Part, initial_std, set_recompute
from parallel.cuts import Cuts
from parallel.fp8.choose import scales_of_part
from parallel.fp8.state import FP8
from parallel.later import LaterGradients
from parallel.mesh import ONE_PROCESS, Mesh
from parallel.precision import PrecisionConfig
from parallel.shards import Shard, shards_of
from parallel.zero import Sharing, Zero, shard


@dataclass(frozen=True)
class BuildOptions:
    """How parts are made, apart from what they are."""

    seed: int
    """Of the initial values."""
    device: torch.device
    """Where they are."""
    compute: torch.dtype
    """Dtype of weights in products."""
    master: torch.dtype
    """Dtype of initial values and of shards."""
    zero: int = 1
    """What data-parallel ranks share."""
    recompute: Literal["none", "selective", "full", "every_n"] = "none"
    """Activations made again in the backward pass."""
    recompute_n: int = 2
    """With every_n: one block in so many."""
    compile: bool = False
    """Compile each block and the loss."""
    cp_exchange: Literal["ring", "all_gather"] = "ring"
    """How context-parallel ranks see each other's keys and values."""
    fp8: PrecisionConfig | None = None
    """Whose products of blocks' linears are in FP8, with a settled backend; None: none are."""
    later: bool = False
    """Put off the gradients of weights, for schedules that split the backward pass."""


@dataclass(frozen=True)
class Built:
    """One part of the model on this rank, ready to train."""

    decoder: Decoder
    """The module."""
    shards: list[Shard]
    """Its parameters."""
    zero: Zero
    """How they are shared over data-parallel ranks."""
    later: LaterGradients | None
    """Where products for gradients wait, if they do."""
    fp8: FP8 | None
    """The scales of its products in FP8, if there are any."""


def build_part(config: ModelConfig, part: Part, mesh: Mesh, options: BuildOptions) -> Built:
    """One part of the model, cut for this rank, with its initial values in the master dtype."""
    later = LaterGradients() if options.later else None
    fp8 = scales_of_part(options.fp8, config.layers, mesh.stage, mesh.twins) if options.fp8 else None
    cuts = Cuts(mesh.axis("tp"), mesh.axis("cp"), options.cp_exchange, mesh.axis("ep"), mesh.tokens, later, fp8)
    decoder = Decoder(config, torch.device("meta"), cuts, part).to(options.master)
    set_recompute(decoder, options.recompute, options.recompute_n)
    if options.compile:
        compile_regions(decoder, options.device)
    sharing = Sharing(mesh.data, mesh.expert_data, options.zero, options.compute, options.master)
    experts = [block.mlp.experts for block in decoder.blocks if isinstance(block.mlp, MoE)]
    zero = shard(decoder, decoder.blocks, experts, sharing)
    decoder.to_empty(device=options.device)
    decoder.reset_buffers(options.device)
    twins, again = shared_by_two_stages(config, part)
    shards = shards_of(decoder, mesh, twins, again)
    initialise(shards, config, options.seed)
    if fp8 is not None:
        fp8.allocate(options.device)
    return Built(decoder, shards, zero, later, fp8)


def shared_by_two_stages(config: ModelConfig, part: Part) -> tuple[frozenset[str], bool]:
    """Names of parameters that the first and the last stage both hold, and whether this is the last."""
    split = config.tied_embeddings and part.first != part.last
    return (frozenset({"embedding.weight"}), part.last) if split else (frozenset(), False)


@torch.no_grad()
def initialise(shards: Iterable[Shard], config: ModelConfig, seed: int) -> None:
    """Fill every shard: norms with one, biases with zero, weights from the hash of (seed, name, index)."""
    for each in shards:
        if each.name.endswith("norm.weight"):
            each.local.fill_(1.0)
        elif each.name.endswith(".bias"):
            each.local.zero_()
        else:
            std = initial_std(each.name, config)
            fill_rectangle(each.local, stream_key(seed, each.name), std, each.shape, each.start)


def build(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The whole decoder on one rank, weights in `dtype`."""
    options = BuildOptions(seed, device, dtype, dtype)
    return build_part(config, Part(range(config.layers)), ONE_PROCESS, options).decoder
