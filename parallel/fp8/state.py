"""Which scales FP8 operands get, and when they change: Transformer Engine's state machine, on any device.

With delayed scaling each linear remembers, for its input x, its weight w and the gradient g of its output, the largest
values of the last micro-batches. Within a pass of a micro-batch the largest value is kept in row 0 of the history. It
closes thus (`reduce_and_update_fp8_tensors` there):

forward ends            x, w: row 0 becomes the maximum of all ranks that share the tensors; new scales; rows move up
backward of the first   g: likewise. It is the last to run, as the first linear of the forward pass is the last of
linear ends             the backward pass
w                       is rounded in the first micro-batch of a step and serves the others; where weights are freed
                        in between, it is rounded again by the same scale
a part made again       uses the scales that its first pass used, and leaves no trace
evaluation              uses the current scales, and leaves no trace
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import log2
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.fp8.formats import (
    BLOCK,
    FORMATS,
    Format,
    Quantized,
    current_scale,
    delayed_scale,
    quantize_blocks,
    quantize_mx,
    quantize_tensor,
)
from parallel.fp8.health import Health
from parallel.mesh import ALONE, Axis
from parallel.precision import PrecisionConfig

Kind = Literal["x", "w", "g"]
Room = Literal["attention", "mlp", "experts"]
"""Where linears are in a block."""
KINDS: tuple[Kind, ...] = ("x", "w", "g")
"""Input, weight, and gradient of the output: columns of the tables."""
_FORWARD, _BACKWARD = slice(0, 2), slice(2, 3)
_FIRST_OF_WEIGHTS = 256.0  # E4M3 then has 6e-5 to 1.75 with all its bits


class Operand(NamedTuple):
    """A matrix in FP8 for the two products that it takes part in."""

    last: Quantized
    """For sums over its last dimension."""
    first: Quantized
    """For sums over its first dimension."""
    scale: Tensor | None = None
    """Of all its values; None: each block has its own."""


class Table:
    """Histories and scales of the linears whose tensors the ranks of one axis share."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.rows = axis, 0
        self.history = self.scale = torch.empty(0)

    def allocate(self, length: int, device: torch.device) -> None:
        """history [n, 3, length] of zeros, scale [n, 3] of ones, fp32."""
        self.history = torch.zeros(self.rows, len(KINDS), length, device=device)
        self.scale = torch.ones(self.rows, len(KINDS), device=device)

    @torch.no_grad()
    def close(self, kinds: slice, forms: list[Format], margin: int, most_recent: bool) -> None:
        """End a pass for some kinds: share maxima, make scales, move the history's rows up."""
        if not self.rows:
            return
        history, scale = self.history[:, kinds], self.scale[:, kinds]
        if self.axis.group is not None:
            newest = history[..., 0].contiguous()
            dist.all_reduce(newest, dist.ReduceOp.MAX, group=self.axis.group)
            history[..., 0] = newest
        amax = history[..., 0] if most_recent else history.amax(-1)
        for column, form in enumerate(forms):
            scale[:, column] = delayed_scale(amax[:, column], scale[:, column], form, margin)
        history.copy_(history.roll(-1, -1))
        history[..., 0] = 0.0


class FP8:
    """Of the linears in one part of the model on this rank.

    Args:
        config: with one of the FP8 names.
        dense: ranks that share the part's dense tensors: tp, cp and data parallelism.
        experts: ranks that have the same experts.
        layers: of the whole model.
    """

    def __init__(self, config: PrecisionConfig, layers: int, dense: Axis = ALONE, experts: Axis = ALONE) -> None:
        self.config, self.recipe, self.layers = config.fp8, config.name, layers
        self.tables = {False: Table(dense), True: Table(experts)}
        self.slots: list[Slot] = []
        self.health = Health()
        hybrid = config.fp8.format == "hybrid" and self.recipe in ("fp8_delayed", "fp8_current")
        self.forms = {kind: FORMATS["e5m2" if hybrid and kind == "g" else "e4m3"] for kind in KINDS}
        self._replayed: dict[bool, Tensor] | None = None
        self.active = False
        """Whether this is a pass of a micro-batch; outside of one (a sample of text) products are in bf16."""
        self._opened = self._records = False
        self.keeps = self.trains = False
        """Whether rounded weights are kept, and whether the pass is one of training, which they serve."""

    @property
    def delayed(self) -> bool:
        """Whether scales have a history."""
        return self.recipe == "fp8_delayed"

    def covers(self, room: Room, layer: int) -> bool:
        """Whether these linears of a block are in FP8."""
        wanted: bool = getattr(self.config, room)
        return wanted and self.config.first_bf16 <= layer < self.layers - self.config.last_bf16

    def slot(self, count: int = 1, expert: bool = False) -> Slot:
        """A place for a linear, or for so many experts' linears."""
        table = self.tables[expert]
        made = Slot(self, expert, table.rows, count)
        table.rows += count
        self.slots.append(made)
        return made

    def linear(self, rows: int, columns: int) -> Slot:  # Transformer Engine asks for the shape
        """A place for a linear [rows, columns]."""
        return self.slot()

    def allocate(self, device: torch.device) -> None:
        """Make the tables, once all linears have a place."""
        for table in self.tables.values():
            table.allocate(self.config.history if self.delayed else 1, device)
        self.health.allocate(sum(table.rows for table in self.tables.values()), len(KINDS), device)

    @contextmanager
    def forward(self, first: bool, keeps: bool) -> Iterator[None]:
        """The forward pass of a micro-batch.

        Args:
            first: of the step: weights have changed.
            keeps: rounded weights are kept for the other micro-batches; else their scales alone.
        """
        training = torch.is_grad_enabled()
        self._opened, self._records = training, training
        self.active, self.keeps, self.trains = True, keeps, training
        if first or not training:
            for slot in self.slots:
                slot.kept.clear()
        try:
            yield
        finally:
            self.active = self._opened = self._records = False
        if training and self.delayed:
            self._close(_FORWARD)

    def backward_ends(self) -> None:
        """The backward pass of a micro-batch has come to its last FP8 linear."""
        if self.delayed:
            self._close(_BACKWARD)

    def _close(self, kinds: slice) -> None:
        for table in self.tables.values():
            forms = [self.forms[kind] for kind in KINDS[kinds]]
            table.close(kinds, forms, self.config.margin, self.config.amax == "most_recent")

    def opens(self) -> bool:
        """Whether the asking linear is the first of this forward pass."""
        opened, self._opened = self._opened, False
        return opened

    def recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the first pass of a part and of the second: `context_fn` of torch's checkpoint."""
        if not self.delayed:
            return nullcontext(), self._again(None)
        return nullcontext(), self._again({expert: table.scale.clone() for expert, table in self.tables.items()})

    @contextmanager
    def _again(self, scales: dict[bool, Tensor] | None) -> Iterator[None]:
        before = self._replayed, self._records, self._opened, self.active
        self._replayed, self._records, self._opened, self.active = scales, False, False, True
        try:
            yield
        finally:  # torch ends a second pass by an exception, once it has what it needs
            self._replayed, self._records, self._opened, self.active = before

    def quantize(self, x: Tensor, kind: Kind, expert: bool, row: int, scale: Tensor | None = None) -> Operand:
        """x [rows, columns] of the linear in a row of a table; scale: of one scale a tensor, where it is known."""
        form = self.forms[kind]
        if self.recipe == "mxfp8":
            return Operand(quantize_mx(x, 1, form), quantize_mx(x, 0, form))
        if self.recipe == "fp8_block":
            if kind == "w":
                square = quantize_blocks(x, (BLOCK, BLOCK), form)
                return Operand(square, square)
            return Operand(quantize_blocks(x, (1, BLOCK), form), quantize_blocks(x, (BLOCK, 1), form))
        if scale is None:
            amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
            scale = self._scale(amax, kind, expert, row) if self.delayed else current_scale(amax, form)
        both = quantize_tensor(x, scale, form)
        return Operand(both, both, scale)

    def _scale(self, amax: Tensor, kind: Kind, expert: bool, row: int) -> Tensor:
        """The scale of now, or of the pass that is made again; the maximum is remembered."""
        table, column = self.tables[expert], KINDS.index(kind)
        if self._records or kind == "g":
            newest = table.history[row, column, 0]
            torch.maximum(newest, amax.nan_to_num(nan=0.0, posinf=torch.inf), out=newest)
        scales = table.scale if self._replayed is None or kind == "g" else self._replayed[expert]
        return scales[row, column].clone()  # the table moves on before the backward pass


class Slot:
    """The place of one linear's scales, or of one for each of so many experts."""

    def __init__(self, fp8: FP8, expert: bool, row: int, count: int) -> None:
        self.fp8, self.expert, self.row, self.count = fp8, expert, row, count
        self.kept: dict[int, Operand | Tensor] = {}

    def operand(self, x: Tensor, kind: Kind, number: int = 0, scale: Tensor | None = None) -> Operand:
        """x [rows, columns] for the expert of this number; scale: one that is known."""
        made = self.fp8.quantize(x, kind, self.expert, self.row + number, scale)
        self.fp8.health.note(x, made.last, self.place(number), KINDS.index(kind), self.fp8.forms[kind])
        return made

    def weight(self, weight: Tensor, number: int = 0) -> Operand:
        """weight [out, in], rounded once a step, or each time by the scale of the first."""
        kept = self.kept.get(number) if self.fp8.trains else None
        if isinstance(kept, Operand):
            return kept
        made = self.operand(weight, "w", number, kept)
        saved = made if self.fp8.keeps else made.scale
        if self.fp8.trains and saved is not None:
            self.kept[number] = saved
        return made

    def place(self, number: int) -> int:
        """Row among all linears: dense ones first."""
        return self.row + number + (self.fp8.tables[False].rows if self.expert else 0)

    @property
    def health(self) -> tuple[Tensor, Tensor]:
        """What Health has of it: sums and maxima, [count, 3, ...]."""
        rows, health = slice(self.place(0), self.place(0) + self.count), self.fp8.health
        return health.sums[rows], health.maxima[rows]

    def state(self) -> dict[str, Tensor]:
        """Views of what a checkpoint keeps: history [3, length] and scale [3], of each expert for experts."""
        table, rows = self.fp8.tables[self.expert], slice(self.row, self.row + self.count)
        tensors = {"history": table.history[rows], "scale": table.scale[rows]}
        return tensors if self.expert else {name: tensor[0] for name, tensor in tensors.items()}


@torch.no_grad()
def set_first_scales(part: nn.Module, tokens: int) -> None:
    """Delayed scales before anything was seen, for a loss that is a mean over so many tokens.

    With 1 for all, as Transformer Engine has it, E5M2 makes zeros of gradients of a mean, which are of size 1 / tokens,
    and the scales of what lies below would not be found before those above.
    """
    for _, slot in slots_of(part):
        scale = slot.state()["scale"]
        scale[..., KINDS.index("w")] = _FIRST_OF_WEIGHTS
        scale[..., KINDS.index("g")] = 2.0 ** round(log2(tokens))


def slots_of(part: nn.Module) -> Iterator[tuple[str, Slot]]:
    """The places of all linears in FP8 of a part of the model, by the global names of their weights."""
    for prefix, module in part.named_modules():
        for name, slot in getattr(module, "slots", {}).items():
            yield f"{prefix}.{name}", slot
