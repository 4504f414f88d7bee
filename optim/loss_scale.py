"""fp16's dynamic loss scale (Micikevicius et al., 2018), held and moved on the device: no step waits for its value.

fp16 has nothing below 6e-8, where many gradients lie, and nothing above 65504. So the objective is made `scale` times
larger, and with it every gradient; the optimizer divides by it again. It is always a power of two, so neither rounds:

    gradients finite                        good + 1; at growth_interval in a row: scale * 2 (up to LARGEST), good = 0
    not finite: the step changes nothing    scale / 2 (down to least), good = 0
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from parallel.precision import LossScaleConfig

LARGEST = 2.0**24
"""Growth ends here: fp16's smallest number then stands for a gradient of 4e-15, far below AdamW's eps. Without an end
a run of gradients near zero, which never overflow, would come to a scale that is infinite itself."""


class LossScale:
    """The scale and its state; the same on every rank, as all see the same gradient norm."""

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.config = config
        self.scale = torch.full((), config.initial, dtype=torch.float32, device=device)
        """[] fp32: what the objective of the next step is multiplied by."""
        self.good = torch.zeros((), dtype=torch.float32, device=device)
        """[] fp32: good steps in a row since it last changed."""

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """After a step; skipped [] is 1.0 where its gradients were not finite, else 0.0."""
        bad, good = skipped > 0, self.good + 1
        due = good >= self.config.growth_interval
        # An initial scale beyond LARGEST stays until an overflow brings it down.
        grown = torch.maximum(self.scale, (self.scale * 2).clamp(max=LARGEST))
        lowered = (self.scale / 2).clamp(min=self.config.least)
        self.scale.copy_(torch.where(bad, lowered, torch.where(due, grown, self.scale)))
        self.good.copy_(good.masked_fill(bad | due, 0.0))

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint keeps, by layout-free name; writing into the tensors is setting them."""
        yield "optim.loss_scale", self.scale
        yield "optim.loss_scale_good", self.good
