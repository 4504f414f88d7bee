"""One optimizer step: gradients of all micro-batches in, new weights out, or nothing if they are not finite.

Where the loss is told as well, it travels in the message of the gradient norm, and both are compared with those of the
steps before (metrics.spikes): a spike changes nothing either where that is asked for. All ranks decide on the device,
from the same bits.

Everything here works on this rank's rectangles alone. Where FSDP shards a parameter, the shard is the fp32
master. Elsewhere compute weights may be bf16; each then has an fp32 master that AdamW updates and that is
rounded into it afterwards, and gradients are fp32 from the first addition on (`grad_dtype`), so micro-batches
add up without bf16 rounding. Under fp16 they come multiplied by the loss scale, which is divided out here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from metrics.spikes import SpikeWindow
from optim.config import OptimConfig
from optim.loss_scale import LossScale
from parallel.shards import Shard

_NORM_PIECE = 1 << 15  # elements whose squares are summed in one fp32 number


@dataclass(frozen=True)
class StepOutcome:
    """Device scalars of one step; reading them waits for the device."""

    grad_norm: Tensor
    """Global norm before clipping, without the loss scale, fp64."""
    skipped: Tensor
    """1.0 where gradients, or the loss if it was told, were not finite and nothing was changed, else 0.0."""
    loss_scale: tuple[Tensor, Tensor] | None = None
    """fp16: what the gradients were multiplied by, and what the next step's will be."""
    loss: Tensor | None = None
    """Of the whole step, on all ranks, fp64, where it was told."""
    spike: Tensor | None = None
    """1.0 where loss or norm was finite and a spike, else 0.0; None: nobody looked."""
    unchanged: Tensor | None = None
    """1.0 where the step changed nothing, as `skipped` or as a spike, else 0.0; None: as `skipped` says."""

    @property
    def without_effect(self) -> Tensor:
        """1.0 where the step changed nothing, else 0.0."""
        return self.skipped if self.unchanged is None else self.unchanged


class Watch(NamedTuple):
    """What tells spikes in a step."""

    loss: Tensor
    """[] fp64, this rank's addend of the step's loss."""
    window: SpikeWindow
    """The steps before; it takes in this one. Every rank has its own, with the same numbers."""
    skips: bool
    """Whether a spike changes nothing; else it is told only."""


def square_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements, an fp64 scalar.

    On a CPU pieces are summed in their own format and added up in fp64: a sum over millions of elements in fp32
    loses up to a hundredth, more the larger the tensor. CUDA's own sum goes by small pieces.
    """
    if gradients[0].device.type == "cpu":
        norms = torch.cat([norm for gradient in gradients for norm in _piece_norms(gradient.reshape(-1))])
    else:
        norms = torch.stack(torch._foreach_norm(list(gradients), 2.0))
    return norms.double().square().sum()


def _piece_norms(flat: Tensor) -> Iterator[Tensor]:
    """Norms of the pieces of a tensor: those of whole pieces, on all threads, and that of the rest."""
    whole = len(flat) // _NORM_PIECE * _NORM_PIECE
    yield torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_PIECE), dim=1)
    yield torch.linalg.vector_norm(flat[whole:]).view(1)


def global_norm(
    gradients: Sequence[tuple[Tensor, int]], everywhere: bool, addend: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Square root of the sum of squares of each distinct element of the model once, an fp64 scalar.

    Args:
        gradients: this rank's rectangles, each with the number of ranks that hold it.
        everywhere: sum over all ranks; every rank gets the same bits.
        addend: [] fp64 of this rank, to be summed in the same message.

    Returns:
        The norm, and the sum of the addends.
    """
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, copies in gradients:
        by_copies[copies].append(gradient)
    total = torch.stack([square_sum(group) / copies for copies, group in by_copies.items()]).sum()
    if addend is None:
        if everywhere:
            dist.all_reduce(total)
        return total.sqrt(), None
    both = torch.stack([total, addend.to(total)])
    if everywhere:
        dist.all_reduce(both)
    return both[0].sqrt(), both[1]


def decays(name: str, parameter: Tensor, config: OptimConfig) -> bool:
    """Whether weight decay applies: to matrices, and to the embedding and head by option."""
    if parameter.dim() < 2:
        return False
    return config.decay_embeddings or not name.startswith(("embedding.", "head."))


class Updater:
    """AdamW over the master weights of this rank, with clipping and skipping inside the fused kernel.

    Parameters come in the masters' dtype; those that FSDP does not shard leave in `compute_dtype`. Where they
    are the same, the parameters are the masters. With a `loss_scale`, gradients come multiplied by it.
    """

    def __init__(
        self, shards: Sequence[Shard], config: OptimConfig, compute_dtype: torch.dtype, everywhere: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self.config, self.shards, self.everywhere, self.loss_scale = config, list(shards), everywhere, loss_scale
        self.masters = [_master(each, compute_dtype) for each in self.shards]
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for each, master in zip(self.shards, self.masters, strict=True):
            groups[decays(each.name, master, config)].append(master)
        self.adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True,
        )  # fmt: skip

    def step(self, lr: float, watch: Watch | None = None) -> StepOutcome:
        """Update every weight with the gradients gathered since the last step, and clear them.

        watch: what tells whether the step is a spike; None: nobody asks.
        """
        held: list[tuple[Tensor, int]] = []
        for each, master in zip(self.shards, self.masters, strict=True):
            master.grad = each.gradient
            held += [(master.grad, each.copies)] if master.grad is not None else []
        scale = None if self.loss_scale is None else self.loss_scale.scale.clone()
        norm, loss = global_norm(held, self.everywhere, watch.loss if watch else None)
        norm = norm if scale is None else norm / scale
        finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
        skipped = unchanged = (~finite).float()
        spike = None
        if watch is not None and loss is not None:
            spike = watch.window.look(loss, norm)
            unchanged = torch.maximum(skipped, spike) if watch.skips else skipped
        self._apply(lr, held, self._divisor(norm) if scale is None else self._divisor(norm) * scale, unchanged)
        # A spike that is skipped had finite gradients: it is a good step to the loss scale.
        return StepOutcome(norm, skipped, self._move_scale(scale, skipped), loss, spike, unchanged)

    def _apply(self, lr: float, held: list[tuple[Tensor, int]], divisor: Tensor, unchanged: Tensor) -> None:
        """AdamW with the gradients over the divisor, or nothing where `unchanged` is 1.0."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if held[0][0].dtype == torch.float64:  # the kernel's divisor is fp32, too coarse for a proof in fp64
            torch._foreach_div_([gradient for gradient, _ in held], divisor)
            divisor = torch.ones_like(divisor)
        # The fused kernel divides gradients by grad_scale and does nothing where found_inf is set: clipping and
        # the loss scale cost no pass over memory and skipping needs no answer from the device.
        self.adamw.grad_scale = divisor.float()  # type: ignore[attr-defined]
        self.adamw.found_inf = unchanged  # type: ignore[attr-defined]
        self.adamw.step()
        self.publish()
        self.clear_gradients()

    def _move_scale(self, scale: Tensor | None, skipped: Tensor) -> tuple[Tensor, Tensor] | None:
        """Follow the step's outcome; scale: the step's own."""
        if self.loss_scale is None or scale is None:
            return None
        self.loss_scale.update(skipped)
        return scale, self.loss_scale.scale.clone()

    def _divisor(self, norm: Tensor) -> Tensor:
        """What gradients are divided by: 1, or (norm + 1e-6) / clip where that is larger."""
        if not self.config.clip:
            return torch.ones_like(norm)
        return ((norm + 1e-6) / self.config.clip).clamp(min=1.0)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the compute weights that are apart from them."""
        apart = [
            (each.parameter, master)
            for each, master in zip(self.shards, self.masters, strict=True)
            if not isinstance(each.parameter, DTensor) and each.parameter is not master
        ]
        if apart:
            torch._foreach_copy_([weight for weight, _ in apart], [master for _, master in apart])

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for each, master in zip(self.shards, self.masters, strict=True):
            each.parameter.grad = master.grad = None

    def tensors(self) -> Iterator[tuple[str, Tensor, Shard]]:
        """Everything a checkpoint keeps: layout-free name, this rank's rectangle in the master's dtype, its place.

        Weights and both moments; writing into the tensors is writing into the optimizer.
        """
        self._ensure_state()
        for each, master in zip(self.shards, self.masters, strict=True):
            yield f"model.{each.name}", master.detach(), each
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"optim.{moment}.{each.name}", self.adamw.state[master][moment], each

    @property
    def updates(self) -> int:
        """Steps that changed the weights (skipped ones do not count)."""
        self._ensure_state()
        return int(self.adamw.state[self.masters[0]]["step"].item())

    def resume(self, updates: int) -> None:
        """Go on from what was written into `tensors()`."""
        self._ensure_state()
        for master in self.masters:
            self.adamw.state[master]["step"].fill_(updates)
        self.publish()

    def _ensure_state(self) -> None:
        """Make AdamW's state as it is before the first step."""
        for master in self.masters:
            if master not in self.adamw.state:
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }


def _master(shard: Shard, compute_dtype: torch.dtype) -> nn.Parameter:
    """What the optimizer updates; a plain parameter of another dtype is rounded, its gradient stays in the master's."""
    parameter = shard.parameter
    if isinstance(parameter, DTensor):
        return nn.Parameter(shard.local)
    if parameter.dtype == compute_dtype:
        return parameter
    master = nn.Parameter(parameter.detach().clone())
    parameter.data = parameter.data.to(compute_dtype)
    parameter.grad_dtype = master.dtype
    return master
