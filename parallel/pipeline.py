"""Pipelines by torch.distributed.pipelining: one stage class for every schedule under every ZeRO stage.

A schedule says which micro-batch a rank works on, and moves activations [T/tp, hidden] and their gradients
between stages. What a stage reads besides (tokens, positions, borders, labels) it looks up by the
micro-batch's number: each pipeline rank has its own loader.

The private names of torch used here: `_backward.stage_backward`, and what `parallel.zero` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward

from parallel.later import LaterGradients
from parallel.schedules import SCHEDULES
from parallel.zero import Zero

Timed = Callable[[str], AbstractContextManager[None]]
"""Gives the time of a block to a named part of the step."""


@dataclass(frozen=True)
class StageParts:
    """One stage before it joins a pipeline."""

    number: int
    """Place among all stages."""
    module: nn.Module
    """Called as module(x, number of the micro-batch [1]); the last stage's returns a scalar to be minimised."""
    zero: Zero
    """How its parameters are shared."""
    later: LaterGradients | None
    """Where its weights' gradients wait, where the schedule splits the backward pass."""


@dataclass(frozen=True)
class Wire:
    """What passes between stages."""

    tokens: int
    """Rows of an activation on this rank: T/tp."""
    hidden: int
    """Columns."""
    dtype: torch.dtype
    """Dtype of activations."""
    loss_dtype: torch.dtype
    """Dtype of the last stage's scalar."""
    device: torch.device
    """Where stages compute."""


Done = tuple[str, int, int]
"""Something a rank did: (F, B, I or W, stage, micro-batch); B is a whole backward pass, I and W its halves."""


class Stage(PipelineStage):
    """A stage that tells FSDP before each backward pass what it is, and can make weights' gradients later.

    Under a schedule that splits the backward pass, I is one ordinary backward pass in which linears put off
    their weights' products; W makes those and then does what FSDP does at a backward pass's end. (The stock
    stage loses gradients there under ZeRO 3, knows no ZeRO 2, and recomputes a block once a parameter group.)
    """

    def __init__(
        self, parts: StageParts, stages: int, wire: Wire, group: ProcessGroup | None, timed: Timed, trace: list[Done],
    ) -> None:  # fmt: skip
        act = torch.empty(wire.tokens, wire.hidden, device="meta", dtype=wire.dtype, requires_grad=True)
        loss = torch.empty((), device="meta", dtype=wire.loss_dtype, requires_grad=True)
        number = torch.empty(1, device="meta", dtype=torch.int64)
        self.zero, self.later, self.timed, self.trace = parts.zero, parts.later, timed, trace
        self.last_backward = False
        super().__init__(
            parts.module, parts.number, stages, wire.device, group=group,
            input_args=(number if parts.number == 0 else act,),
            output_args=(loss if parts.number == stages - 1 else act,),
            dw_builder=self._put_off if parts.later is not None else None,
        )  # fmt: skip

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch."""
        self.trace.append(("F", self.stage_index, fwd_chunk_id))
        with self.timed("forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward of one micro-batch, or its first half."""
        if self.has_backward:
            whole = kwargs.get("full_backward", True)
            self.trace.append(("B" if whole else "I", self.stage_index, bwd_chunk_id))
        with self.timed("backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Second half of a backward pass."""
        self.last_backward = last_backward
        if self.has_backward:
            self.trace.append(("W", self.stage_index, bwd_chunk_id))
        with self.timed("backward"):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        """One ordinary backward pass, after FSDP was told what it is."""
        self.last_backward = last_backward
        if self.later is None:
            self.zero.before_backward(last_backward)
        else:
            self.zero.hold_gradients()
        gradients = stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
        return gradients, None

    def _put_off(self) -> Callable[[], None]:
        """What W has to do for the backward pass that has just ended."""
        products = self.later.take() if self.later is not None else []

        def make() -> None:
            LaterGradients.run(products)
            self.zero.release_gradients(self.last_backward)

        return make

    # Between two stages on one rank the schedule hands gradients over even when it only evaluates.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradient of the input, for the stage before on this rank."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradient of the output, from the stage after on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """The stages of this rank under one schedule, which is made once for each number of micro-batches."""

    def __init__(
        self, name: str, parts: Sequence[StageParts], stages: int, wire: Wire, group: ProcessGroup | None, timed: Timed,
    ) -> None:  # fmt: skip
        self.kind, self.parts = SCHEDULES[name], parts
        self.order: list[Done] = []
        self.first = any(each.number == 0 for each in parts)
        self.last = any(each.number == stages - 1 for each in parts)
        self._stage = lambda each: Stage(each, stages, wire, group, timed, self.order)
        self._made: dict[int, Any] = {}

    def train(self, micro_batches: int) -> None:
        """Forward and backward of every micro-batch of a step."""
        self.order.clear()
        self._run(self._schedule(micro_batches).step, micro_batches)

    @torch.no_grad()
    def evaluate(self, micro_batches: int) -> None:
        """Forward alone."""
        self._run(self._schedule(micro_batches).eval, micro_batches)

    def _schedule(self, micro_batches: int) -> Any:
        """torch's schedule over stages of its own: their buffers are one a micro-batch. Two are kept: a run trains with
        one number of micro-batches at a time, and evaluates with one."""
        if micro_batches not in self._made:
            if len(self._made) == 2:
                del self._made[next(iter(self._made))]
            stages = [self._stage(each) for each in self.parts]
            self._made[micro_batches] = getattr(schedules, self.kind.torch_name)(
                stages if self.kind.several else stages[0], micro_batches,
                loss_fn=lambda output, target: output, scale_grads=False,
            )  # fmt: skip
        self._made[micro_batches] = self._made.pop(micro_batches)  # the last one used stands last
        return self._made[micro_batches]

    def _run(self, work: Callable[..., object], micro_batches: int) -> None:
        numbers = torch.arange(micro_batches)
        inputs = (numbers,) if self.first else ()
        losses: list[Tensor] | None = [] if self.last else None
        work(*inputs, mb=numbers, target=numbers if self.last else None, losses=losses, return_outputs=False)
