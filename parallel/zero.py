"""ZeRO 0 to 3 and HSDP by FSDP2: what data-parallel ranks share (Rajbhandari et al., 2020; Zhao et al., 2023).

zero   held whole on each rank                    moved in a step of m micro-batches
0      weights, gradients, optimizer state        all-reduce of gradients, once
1      weights and gradients, within the step     gather of weights once, reduce-scatter of gradients once
2      weights, within the step                   gather once, reduce-scatter m times
3      one block at a time                        gather 2m times, reduce-scatter m times

Gradients are summed, never averaged: losses are divided by the step's valid tokens beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel.exchange import DirectGather, DirectReduceScatter


@dataclass(frozen=True)
class Zero:
    """How one part of the model is sharded; says before each backward pass what it has to do."""

    stage: int
    """0 to 3."""
    module: FSDPModule | None
    """The part, if it is sharded at all."""
    replicated: bool = False
    """Whether several groups hold the same shards."""

    def before_backward(self, last: bool) -> None:
        """Set what the coming backward pass does; `last`: it is of the step's last micro-batch."""
        if self.module is None:
            return
        if self.stage < 2:
            self.module.set_requires_gradient_sync(last)
        elif self.replicated:
            self.module.set_requires_all_reduce(last)
        if self.stage < 3:
            self.module.set_is_last_backward(last)
            self.module.set_reshard_after_backward(last)

    def hold_gradients(self) -> None:
        """The coming backward pass leaves the gradients where they are: those of weights are made later."""
        if self.module is None:
            return
        self.module.set_requires_gradient_sync(False)
        self.module.set_is_last_backward(False)
        self.module.set_reshard_after_backward(self.stage == 3)

    def _even_out(self, group: Any) -> None:
        """Make a group's gradients one message of one dtype, the same for every micro-batch.

        Those of norms came with the first half of a backward pass and are fp32 sums by now, those of linears
        have just been made; and what replicas add up over micro-batches must always be of all parameters.
        """
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
            bare = parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None
            if bare and self.replicated and self.stage > 1:
                dtype = parameter.reduce_dtype or parameter.unsharded_param.dtype
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter.unsharded_param, dtype=dtype)

    def release_gradients(self, last: bool) -> None:
        """Do what a backward pass does at its end, now that the gradients of the weights are there.

        Uses what PyTorch's own pipeline stage uses (`perform_reduce_grad`): there is no public call.
        """
        if self.module is None:
            return
        self.module.set_requires_gradient_sync(last or self.stage > 1)
        if self.replicated:
            self.module.set_requires_all_reduce(last)
        self.module.set_is_last_backward(last)
        self.module.set_reshard_after_backward(last or self.stage == 3)
        root = fully_shard.state(self.module)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                self._even_out(group)
                group.post_backward()
        if last:
            root._root_post_backward_final_callback()


def shard(
    part: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh | None, stage: int, compute: torch.dtype,
    master: torch.dtype,
) -> Zero:  # fmt: skip
    """Shard each block, then what is left of the part; without other ranks nothing is done.

    Args:
        mesh: (shard) or (replicate, shard).
        compute: dtype of the weights in products.
        master: dtype of the shards, the gradients' reduction and the optimizer.
    """
    if mesh is None:
        return Zero(stage, None)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute, reduce_dtype=master, cast_forward_inputs=False
    )
    for module in (*blocks, part):
        fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    sharded = [module for module in (*blocks, part) if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu" and mesh.size(-1) > 1:
            module.set_custom_all_gather(DirectGather())
            module.set_custom_reduce_scatter(DirectReduceScatter())
    if stage == 3 and mesh.device_type == "cuda":  # gloo has no stream of its own to gather on meanwhile
        for module, following in pairwise(sharded[:-1]):
            module.set_modules_to_forward_prefetch([following])
    return Zero(stage, sharded[-1], mesh.ndim == 2)
