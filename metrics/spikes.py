"""Whether a step's loss or gradient norm has jumped, found on the device: no step waits for the answer.

Loss and norm of the last good steps stand in a ring. A step whose loss or norm lies above

    limit = mean + sigma * max(std, 0.01 |mean|)          of the ring; infinite until the ring is full

is a spike. (The floor keeps a ring of nearly equal numbers from calling every tremble one.) Falls never are.

    step                          enters the ring           spikes in a row
    loss or norm not finite       no                        as before
    a spike                       no                        + 1
    the last of `patience`        yes, as the first of an   0
    spikes in a row               empty ring
    any other                     yes                       0

So a jump that stays is a new level: after an eighth of the ring's length (at least 3) the training goes on there, and
the ring fills anew, during which no step is a spike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FLOOR = 0.01  # of the mean: the least standard deviation
_COUNTS = 3  # numbers behind the ring's in the state: how many it holds, its next place, spikes in a row


class SpikeWindow:
    """The ring. All numbers are fp64; given the same ones, every rank comes to the same answers."""

    def __init__(self, size: int, sigma: float, device: torch.device) -> None:
        """size: steps that a new one is compared with; sigma: standard deviations above their mean."""
        self.size, self.sigma, self.patience = size, sigma, max(3, size // 8)
        self.state = torch.zeros(2 * size + _COUNTS, dtype=torch.float64, device=device)
        """[2 size + 3]: losses, norms, and three counts; what is written into it is how it goes on."""
        self._ring = self.state[: 2 * size].view(2, size)
        self._held, self._next, self._in_a_row = self.state[2 * size :].unbind()

    @torch.no_grad()
    def limits(self) -> Tensor:
        """[2]: of loss and norm, above which the coming step is a spike."""
        mean, std = self._ring.mean(1), self._ring.std(1)
        limits = mean + self.sigma * torch.maximum(std, _FLOOR * mean.abs())
        return limits.where(self._held >= self.size, math.inf)

    @torch.no_grad()
    def look(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Take a step's loss and norm, [] each; 1.0 where the step is a spike, else 0.0, [] fp32."""
        now = torch.stack([loss.double(), norm.double()])
        finite = now.isfinite().all()
        above = finite & (now > self.limits()).any()
        in_a_row = torch.where(above, self._in_a_row + 1, self._in_a_row.masked_fill(finite, 0.0))
        settles = in_a_row >= self.patience
        spike, enters = above & ~settles, finite & (~above | settles)
        place = self._next.long().view(1)
        self._ring.index_copy_(1, place, now[:, None].where(enters, self._ring.index_select(1, place)))
        held = self._held.masked_fill(settles, 0.0)
        self._held.copy_((held + enters).clamp(max=self.size))
        self._next.copy_((self._next + enters) % self.size)
        self._in_a_row.copy_(in_a_row.masked_fill(settles, 0.0))
        return spike.float()
