"""One optimizer step: gradients of all micro-batches in, new weights out, or nothing if they are not finite.

Compute weights may be bf16; each then has an fp32 master that AdamW updates and that is rounded into it
afterwards. Their gradients are fp32 from the first addition on (`grad_dtype`), so micro-batches add up
without bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from errors import CheckpointRefused
from optim.config import OptimConfig

_NORM_PIECE = 1 << 15  # elements whose squares are summed in one fp32 number


@dataclass(frozen=True)
class StepOutcome:
    """Device scalars of one step; reading them waits for the device."""

    grad_norm: Tensor
    """Global norm before clipping, fp64."""
    skipped: Tensor
    """1.0 where the gradients were not finite and nothing was changed, else 0.0."""


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Square root of the sum of squares of all elements, an fp64 scalar.

    Pieces are summed in their own format and added up in fp64: a sum over millions of elements in fp32 loses
    up to a hundredth, more the larger the tensor.
    """
    pieces = [piece for gradient in gradients for piece in gradient.reshape(-1).split(_NORM_PIECE)]
    return torch.stack(torch._foreach_norm(pieces, 2.0)).double().square().sum().sqrt()


def decays(name: str, parameter: Tensor, config: OptimConfig) -> bool:
    """Whether weight decay applies: to matrices, and to the embedding and head by option."""
    if parameter.dim() < 2:
        return False
    return config.decay_embeddings or not name.startswith(("embedding.", "head."))


class Updater:
    """AdamW over the master weights of a model, with clipping and skipping inside the fused kernel.

    The model comes in the masters' dtype and leaves in `compute_dtype`; where they are the same, the model's
    parameters are the masters.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, compute_dtype: torch.dtype) -> None:
        self.config = config
        self.compute = dict(model.named_parameters())
        self.masters = _split_masters(model, compute_dtype)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, master in self.masters.items():
            groups[decays(name, master, config)].append(master)
        self.adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, fused=True,
        )  # fmt: skip

    @property
    def _apart(self) -> list[str]:
        """Names whose master is another tensor than the compute weight."""
        return [n for n, p in self.compute.items() if self.masters[n] is not p]

    def step(self, lr: float) -> StepOutcome:
        """Update every weight with the gradients gathered since the last step, and clear them."""
        for name, parameter in self.compute.items():
            self.masters[name].grad = parameter.grad
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = global_norm(gradients)
        skipped = (~norm.isfinite()).float()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        divisor = self._divisor(norm)
        if gradients[0].dtype == torch.float64:  # the kernel's divisor is fp32, too coarse for a proof in fp64
            torch._foreach_div_(gradients, divisor)
            divisor = torch.ones_like(divisor)
        # The fused kernel divides gradients by grad_scale and does nothing where found_inf is set: clipping
        # costs no pass over memory and skipping needs no answer from the device.
        self.adamw.grad_scale = divisor.float()  # type: ignore[attr-defined]
        self.adamw.found_inf = skipped  # type: ignore[attr-defined]
        self.adamw.step()
        self.publish()
        self.clear_gradients()
        return StepOutcome(norm, skipped)

    def _divisor(self, norm: Tensor) -> Tensor:
        """What gradients are divided by: 1, or (norm + 1e-6) / clip where that is larger."""
        if not self.config.clip:
            return torch.ones_like(norm)
        return ((norm + 1e-6) / self.config.clip).clamp(min=1.0)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the compute weights."""
        names = self._apart
        if names:
            torch._foreach_copy_([self.compute[n] for n in names], [self.masters[n] for n in names])

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for name, parameter in self.compute.items():
            parameter.grad = self.masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint keeps, by layout-free name: weights and both moments, in the master's dtype."""
        self._ensure_state()
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            out[f"model.{name}"] = master.detach()
            out[f"optim.exp_avg.{name}"] = self.adamw.state[master]["exp_avg"]
            out[f"optim.exp_avg_sq.{name}"] = self.adamw.state[master]["exp_avg_sq"]
        return out

    @property
    def updates(self) -> int:
        """Steps that changed the weights (skipped ones do not count)."""
        self._ensure_state()
        return int(self.adamw.state[next(iter(self.masters.values()))]["step"].item())

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take over what `tensors()` gave, copying in place; names, shapes and dtypes must be the same."""
        own = self.tensors()
        _check_same(own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for master in self.masters.values():
            self.adamw.state[master]["step"].fill_(updates)
        self.publish()

    def _ensure_state(self) -> None:
        """Make AdamW's state as it is before the first step."""
        for master in self.masters.values():
            if master not in self.adamw.state:
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }


def _split_masters(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Round the model to compute_dtype, keeping its parameters as masters; gradients take the masters' dtype."""
    named = dict(model.named_parameters())
    if all(p.dtype == compute_dtype for p in named.values()):
        return named
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    model.to(compute_dtype)
    for name, parameter in named.items():
        parameter.grad_dtype = masters[name].dtype
    return masters


def _check_same(own: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes differ from the model's, naming them."""
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or extra:
        raise CheckpointRefused(
            f"the checkpoint's tensors are not this model's: missing {missing[:5]} ({len(missing)}), "
            f"unexpected {extra[:5]} ({len(extra)}); resume with the model config that wrote it"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            raise CheckpointRefused(
                f"tensor {name} is {tuple(given[name].shape)} {given[name].dtype} in the checkpoint, "
                f"{tuple(tensor.shape)} {tensor.dtype} here; resume with the model and precision that wrote it"
            )
