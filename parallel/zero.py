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
from torch.distributed.tensor import Shard

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


@dataclass(frozen=True)
class Sharing:
    """Which ranks share the parameters of one part of the model, and how."""

    mesh: DeviceMesh | None
    """(shard) or (replicate, shard); None where nothing is shared."""
    expert_mesh: DeviceMesh | None
    """The same for experts."""
    stage: int
    """0 to 3."""
    compute: torch.dtype
    """Dtype of the weights in products."""
    master: torch.dtype
    """Dtype of the shards, the gradients' reduction and the optimizer."""

    def apply(self, module: nn.Module, expert: bool) -> None:
        """Share the parameters of a module that are not shared yet."""
        mesh = self.expert_mesh if expert else self.mesh
        if mesh is None:
            raise ValueError("the ranks that share these parameters have no groups: make_mesh(..., experts=True)")
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.compute == self.master else self.compute, reduce_dtype=self.master,
            cast_forward_inputs=False,
        )  # fmt: skip
        ranks = mesh.size(-1)
        fully_shard(
            module, mesh=mesh, reshard_after_forward=self.stage == 3, mp_policy=policy,
            shard_placement_fn=(lambda weight: Shard(_dimension(weight, ranks))) if expert else None,
        )  # fmt: skip
        if not isinstance(module, FSDPModule):
            raise TypeError(f"fully_shard left a {type(module).__name__}")
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if mesh.device_type == "cpu" and ranks > 1:
            module.set_custom_all_gather(DirectGather())
            module.set_custom_reduce_scatter(DirectReduceScatter())


def _dimension(weight: nn.Parameter, ranks: int) -> int:
    """Whole experts to a rank; where they are too few, rows of every expert to each."""
    return 1 if len(weight) % ranks and weight.shape[1] % ranks == 0 else 0


def shard(part: nn.Module, blocks: Sequence[nn.Module], experts: Sequence[nn.Module], sharing: Sharing) -> Zero:
    """Shard the experts, each block, then what is left of the part; without other ranks nothing is done.

    Args:
        experts: modules inside the blocks whose parameters are cut over ep.
    """
    if sharing.mesh is None:
        return Zero(sharing.stage, None)
    for module in (*experts, *blocks, part):
        sharing.apply(module, expert=module in experts)
    sharded = [module for module in part.modules() if isinstance(module, FSDPModule)]  # in the order of use
    if sharing.stage == 3 and sharing.mesh.device_type == "cuda":  # gloo has no stream of its own to gather on
        for module, following in pairwise(sharded[1:]):
            module.set_modules_to_forward_prefetch([following])
    meshes = [sharing.mesh, *([sharing.expert_mesh] if experts and sharing.expert_mesh else [])]
    return Zero(sharing.stage, sharded[0], any(mesh.ndim == 2 for mesh in meshes))
