"""FP8's products by NVIDIA Transformer Engine 2.20.2, behind the interface of the emulation.

Nothing here has run on hardware: no GPU with FP8 was at hand. Every call is bound to Transformer Engine's own sources
by tests/parallel/test_te.py, which also runs this file against a stand-in on a CPU.

weights     A `te.Linear` without a parameter stands beside each of our linears, outside the tree of modules, and is
            lent the weight for each call. So names, cuts, collectives, FSDP and checkpoints are ours, and there is no
            `_extra_state` (which is a pickle).
autocast    Around the forward pass of a micro-batch. At its end Transformer Engine shares the maxima of x and w over
            the ranks of the stage, and makes new scales (`autocast_exit`: only where gradients are on); at the end of
            the backward pass of the first linear those of g (`is_first_fp8_module`). It does this for all linears of
            the process, so that a process may hold one stage alone. A group of None would be the whole world: a stage
            on one rank has `reduce_amax=False` instead.
first       `is_first_microbatch=True` rounds a weight anew, False takes the kept copy, None keeps none. A linear
            inside FSDP2 keeps none (`is_fsdp2`), and rounds again in the backward pass, by a later scale; ours is
            outside, and our weights stay gathered within a step.
again       Part of a model made again runs in `activation_recompute_forward`'s second phase, which brings back the
            scales of the first pass and leaves no trace. `te.checkpoint` would also enter an autocast of its own, whose
            end moves all histories on; so PyTorch's checkpoint is given these contexts, and the first pass's state
            of autocast (`get_autocast_state`), which moves nothing.
evaluation  Row 0 of the histories is cleared afterwards: Transformer Engine leaves what it has seen there.
state       `fp8_meta["scaling_fwd"|"scaling_bwd"].amax_history` [length, tensors] and `.scale` [tensors], by
            FP8FwdTensorIdx and FP8BwdTensorIdx; here [3, length] and [3] of x, w and g, as the emulation has them.

Not done: experts (`GroupedLinear` has a parameter for each, ours have one), zero-bubble schedules (`backward_dw`
assigns `.grad` where it ought to add), zero=3, and several stages a process with fp8_delayed. conf/precision_rules.py
refuses them. How FP8 fares is not measured: Transformer Engine's operands stay inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from errors import ConfigRefused
from parallel.fp8.linear import fp8_linear
from parallel.fp8.state import FP8, KINDS, Slot
from parallel.later import LaterGradients
from parallel.mesh import ALONE, Axis
from parallel.precision import PrecisionConfig

_MULTIPLE, _MX_MULTIPLE = 16, 32
_SUMS, _MAXIMA = 5, 2


def te_recipe(config: PrecisionConfig, shared: bool) -> Any:
    """Transformer Engine's recipe of a precision; what its environment variables would set is given.

    Args:
        shared: whether maxima are those of several ranks.
    """
    from transformer_engine.common import recipe

    fp8 = config.fp8
    form = recipe.Format.HYBRID if fp8.format == "hybrid" else recipe.Format.E4M3
    if config.name == "fp8_delayed":
        return recipe.DelayedScaling(
            margin=fp8.margin, fp8_format=form, amax_history_len=fp8.history, amax_compute_algo=fp8.amax,
            reduce_amax=shared, backward_override=None,
        )  # fmt: skip
    if config.name == "fp8_current":
        return recipe.Float8CurrentScaling(use_power_2_scales=False, fp8_format=form, backward_override=None)
    if config.name == "fp8_block":
        return recipe.Float8BlockScaling(
            use_f32_scales=False, fp8_format=recipe.Format.E4M3, x_block_scaling_dim=1, w_block_scaling_dim=2,
            grad_block_scaling_dim=1, backward_override=None,
        )  # fmt: skip
    return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3, backward_override=None, enable_2d_quantization=False)


class TransformerEngine(FP8):
    """Of the linears in one part of the model on this rank; the arguments are FP8's.

    The tables hold what a checkpoint reads and fills; Transformer Engine has tensors of its own.
    """

    def __init__(self, config: PrecisionConfig, layers: int, dense: Axis = ALONE, experts: Axis = ALONE) -> None:
        super().__init__(config, layers, dense, experts)
        self.made = te_recipe(config, shared=dense.group is not None)
        self.multiple = _MX_MULTIPLE if config.name == "mxfp8" else _MULTIPLE
        self.first: bool | None = None
        """What linears are told as is_first_microbatch."""
        self.linears: list[TESlot] = []

    def slot(self, count: int = 1, expert: bool = False) -> Slot:
        """There is none without a shape: see `linear`."""
        raise ConfigRefused(
            f"precision.fp8.experts=true\n     rule: Transformer Engine makes no products of {count} experts in one "
            "parameter\n     fix:  write precision.fp8.experts=false, or precision.fp8.backend=emulate"
        )

    def linear(self, rows: int, columns: int) -> TESlot:
        """A place for a linear [rows, columns]."""
        if rows % self.multiple or columns % self.multiple:
            raise ConfigRefused(
                f"precision.fp8.backend=te\n     rule: a linear [{rows}, {columns}] of one rank is not of whole "
                f"multiples of {self.multiple}\n     fix:  change model.hidden, model.ffn, model.heads or parallel.tp; "
                "or write precision.fp8.backend=emulate"
            )
        table = self.tables[False]
        made = TESlot(self, table.rows, rows, columns)
        table.rows += 1
        self.slots.append(made)
        self.linears.append(made)
        return made

    def allocate(self, device: torch.device) -> None:
        """Make the tables, and Transformer Engine's tensors, so that a checkpoint can fill them before the first pass.

        Gradients are off: else the end of the context would move histories on.
        """
        super().allocate(device)
        with torch.no_grad(), self._autocast():
            for each in self.linears:
                each.allocate()

    @contextmanager
    def forward(self, first: bool, keeps: bool) -> Iterator[None]:
        """As FP8's; Transformer Engine does at the end what a pass's end asks for."""
        training = torch.is_grad_enabled()
        for each in self.linears:
            each.fill()
        self.first, self.active = first if training and keeps else None, True
        try:
            with self._autocast():
                yield
        finally:
            self.first, self.active = None, False
            if self.delayed and not training:
                for each in self.linears:
                    each.forget()

    def recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """As FP8's. Transformer Engine keeps scales in queues: a first pass that is never made again must not ask."""
        if not torch.is_grad_enabled():
            return nullcontext(), nullcontext()
        from transformer_engine.pytorch.distributed import get_activation_recompute_contexts
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        first, second = get_activation_recompute_contexts()
        kept = None if self.first is None else False
        return first, self._once_more(second, FP8GlobalStateManager.get_autocast_state(), kept)

    @contextmanager
    def _once_more(self, phase: AbstractContextManager[None], state: object, kept: bool | None) -> Iterator[None]:
        """A second pass: the first one's recipe, by the kept copies of weights if there are any."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        before, self.first = (FP8GlobalStateManager.get_autocast_state(), self.first, self.active), kept
        self.active = True
        FP8GlobalStateManager.set_autocast_state(state)
        try:
            with phase:
                yield
        finally:
            FP8GlobalStateManager.set_autocast_state(before[0])
            self.first, self.active = before[1:]

    def _autocast(self) -> AbstractContextManager[None]:
        import transformer_engine.pytorch as te

        group = self.tables[False].axis.group
        made: AbstractContextManager[None] = te.autocast(enabled=True, recipe=self.made, amax_reduction_group=group)
        return made


class TESlot(Slot):
    """One linear, and the `te.Linear` that makes its products."""

    def __init__(self, te: TransformerEngine, row: int, rows: int, columns: int) -> None:
        super().__init__(te, False, row, 1)
        self.te, self.lent = te, False
        self.linear = _without_parameters(rows, columns)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it leaves compiled code itself, to keep weights
    def product(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """x [T, in], weight [out, in] -> [T, out]."""
        if len(x) % self.te.multiple:
            raise ConfigRefused(
                f"precision.fp8.backend=te\n     rule: {len(x)} tokens of a micro-batch on one rank are no multiple of "
                f"{self.te.multiple}\n     fix:  change train.micro_batch or train.seq_len, or write "
                "precision.fp8.backend=emulate"
            )
        self.linear.fast_setattr("weight", weight)
        result: Tensor = self.linear(x, is_first_microbatch=self.te.first)
        return result

    def allocate(self) -> None:
        """Make its histories and scales, inside autocast."""
        self.linear.init_fp8_metadata(num_gemms=1)

    def state(self) -> dict[str, Tensor]:
        """As Slot's, with what they are now. What they are filled with is used from the next pass on."""
        for (history, scale), (theirs, their_scale) in self._both():
            history.copy_(theirs)
            scale.copy_(their_scale)
        self.lent = True
        return super().state()

    def fill(self) -> None:
        """Take over what may have been filled into `state()`, if that was asked for."""
        if not self.lent:
            return
        for (history, scale), (theirs, their_scale) in self._both():
            theirs.copy_(history)
            their_scale.copy_(scale)
        self.lent = False

    def forget(self) -> None:
        """Clear the maxima of x and w of a pass that leaves no trace."""
        self.linear.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    @property
    def health(self) -> tuple[Tensor, Tensor]:
        """Unknown: sums [1, 3, 5] and maxima [1, 3, 2] of NaN."""
        device = self.te.tables[False].scale.device
        unknown = torch.full((1, len(KINDS), _SUMS + _MAXIMA), torch.nan, device=device)
        return unknown[..., :_SUMS], unknown[..., _SUMS:]

    def _both(self) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """(history [length], scale []) of x, w and g, the table's and Transformer Engine's; none without a past."""
        if not self.te.delayed:
            return
        from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx

        places = (
            ("scaling_fwd", FP8FwdTensorIdx.GEMM1_INPUT),
            ("scaling_fwd", FP8FwdTensorIdx.GEMM1_WEIGHT),
            ("scaling_bwd", FP8BwdTensorIdx.GRAD_OUTPUT1),
        )
        table = self.te.tables[False]
        for column, (key, index) in enumerate(places):
            meta = self.linear.fp8_meta[key]
            yield (table.history[self.row, column], table.scale[self.row, column]), (
                meta.amax_history[:, index], meta.scale[index],
            )  # fmt: skip


def _without_parameters(rows: int, columns: int) -> Any:
    """A `te.Linear` that owns nothing: `fast_setattr` lends it a weight, which it finds as it would its own.

    The device must be the word: a torch.device("meta") would be told to put values in.
    """
    import transformer_engine.pytorch as te

    linear = te.Linear(columns, rows, bias=False, params_dtype=torch.bfloat16, parallel_mode=None, device="meta")
    del linear.weight
    return linear


def linear_product(x: Tensor, weight: nn.Parameter, slot: Slot, later: LaterGradients | None) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out] in the dtype of x."""
    if isinstance(slot, TESlot):
        made: Tensor = slot.product(x, weight)
        return made
    return fp8_linear(x, weight, slot, later)
