"""Which experts a token uses, with what weights, and what keeps the experts' loads even.

Scores of a token's experts are the softmax or sigmoid of fp32 logits. The k best by score + bias are chosen; weights
come from the scores alone (DeepSeek-V3, section 2.1.2). Balance losses (over a micro-batch: Fedus et al., 2022; over a
sequence: DeepSeek-V3) and the z-loss (Zoph et al., 2022) hang their gradients on the weights, so that they need no
way to the objective on the last pipeline stage.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, MoEConfig
from model.context import BlockContext
from parallel.collectives import add_up
from parallel.cuts import Cuts
from parallel.expert import histogram


class Routing(NamedTuple):
    """The pairs of this rank's T tokens with their k experts each."""

    experts: Tensor
    """[T, k] int64, a token's all different, the best first."""
    weights: Tensor
    """[T, k] fp32 (fp64 in fp64), differentiable; the losses' gradients hang on them."""
    kept: Tensor | None
    """[T, k] bool, False where capacity drops a pair; None: none is dropped."""


class Router(nn.Module):
    """x [T, hidden], this rank's tokens -> Routing. Every rank of tp has the whole weight."""

    balance: Tensor
    tally: Tensor

    def __init__(self, config: ModelConfig, cuts: Cuts, device: torch.device | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("model.moe is null: there are no experts to choose from")
        self.moe, self.tp, self.tokens = config.moe, cuts.tp, cuts.tokens
        self.weight = nn.Parameter(torch.empty(config.moe.experts, config.hidden, device=device))
        self.register_buffer("balance", torch.empty(config.moe.experts, device=device))
        self.register_buffer("tally", None, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Zeros, once the memory is there: biases in fp32 at least, whose steps are small; sums in fp64."""
        device, count = self.balance.device, self.moe.experts
        wide = torch.promote_types(self.balance.dtype, torch.float32)
        self.balance = torch.zeros(count, dtype=wide, device=device)
        widest = torch.float32 if device.type == "mps" else torch.float64
        self.tally = torch.zeros(count + 4, dtype=widest, device=device)

    def forward(self, x: Tensor, context: BlockContext) -> Routing:
        """x [T, hidden] -> Routing. Where gradients are made, losses are attached and `tally` is added to."""
        logits: Tensor = _WideLinear.apply(x, self.weight)
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        bias = self.balance.to(scores.dtype) if self.moe.balance == "bias" else None
        experts = choose(scores.detach(), bias, self.moe)
        chosen = scores.gather(1, experts)
        kept = within_capacity(experts, chosen.detach(), self.moe)
        routing = Routing(experts, weights_of(chosen, self.moe), kept)
        return self._balanced(routing, logits, scores, context) if torch.is_grad_enabled() else routing

    @torch.no_grad()
    def update_balance(self, loads: Tensor, skipped: Tensor) -> None:
        """After a step, move each bias up where the load was under the mean, down where it was over.

        Args:
            loads: [E] pairs of each expert in the step, on all ranks.
            skipped: 1.0 where the step changed nothing, else 0.0.
        """
        direction = (loads.mean() - loads).sign() * (1 - skipped)
        self.balance += (self.moe.bias_rate * direction).to(self.balance.dtype)

    def _balanced(self, routing: Routing, logits: Tensor, scores: Tensor, context: BlockContext) -> Routing:
        """The same with the losses of logits and scores [T, E] attached; loads and losses go into the tally."""
        # Sigmoid scores do not sum to one: as they are, lower ones all round would lower the loss.
        shares = scores if self.moe.score == "softmax" else normalized(scores)
        balance_loss, z_loss = scores.new_zeros(()), scores.new_zeros(())
        if self.moe.balance_coefficient > 0:
            balance_loss = self._balance_loss(shares, routing.experts, context)
        if self.moe.z_loss > 0:
            z_loss = self.moe.z_loss * context.share * logits.logsumexp(-1).square().sum()
        self._note(shares.detach(), routing, balance_loss.detach(), z_loss.detach())
        return routing._replace(weights=_Attach.apply(routing.weights, balance_loss + z_loss, context.loss_scale))

    def _balance_loss(self, shares: Tensor, experts: Tensor, context: BlockContext) -> Tensor:
        """This rank's addend of coefficient * E * sum_i f_i P_i, averaged over all tokens of the step.

        f_i is the share of expert i in the choices of a whole sequence (or micro-batch), P_i the mean of shares
        [T, E] over it. Counts carry no gradient, so that none has to pass their sum over ranks.
        """
        local, count = len(shares), self.moe.experts
        groups, of_token = 1, torch.zeros(local, dtype=torch.int64, device=shares.device)
        if self.moe.balance != "batch":
            groups = -(-local * self.tp.size // context.seq_len)
            of_token = (torch.arange(local, device=shares.device) + self.tp.rank * local) // context.seq_len
        pairs = histogram((of_token[:, None] * count + experts).flatten(), groups * count).to(shares.dtype)
        add_up([pairs], self.tokens)
        often = pairs.view(groups, count) * (groups / (experts.numel() * self.tokens.size))
        return self.moe.balance_coefficient * count * context.share * (often[of_token] * shares).sum()

    @torch.no_grad()
    def _note(self, shares: Tensor, routing: Routing, balance_loss: Tensor, z_loss: Tensor) -> None:
        """Add to the tally: loads [E], entropy of the shares [T, E] summed over tokens, losses, dropped pairs."""
        dropped = torch.zeros_like(z_loss) if routing.kept is None else (~routing.kept).sum()
        sums = (torch.special.entr(shares).sum(), balance_loss, z_loss, dropped)
        loads = histogram(routing.experts.flatten(), self.moe.experts)
        self.tally += torch.cat([loads.to(self.tally.dtype), torch.stack([s.to(self.tally.dtype) for s in sums])])


def choose(scores: Tensor, bias: Tensor | None, moe: MoEConfig) -> Tensor:
    """Experts [T, k] int64 of the highest scores [T, E] + bias [E].

    With groups, a token's experts are all in its best `groups_chosen`; a group is as good as its two best together.
    """
    ranked = scores if bias is None else scores + bias
    if moe.groups_chosen < moe.groups:
        by_group = ranked.view(len(ranked), moe.groups, -1)
        best_two = by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
        closed = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, best(best_two, moe.groups_chosen), False)
        ranked = by_group.masked_fill(closed[:, :, None], -math.inf).flatten(1)
    return best(ranked, moe.top_k)


def best(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of each row of values [T, n], the largest first: [T, count] int64.

    Of equal ones the first comes first; `topk` orders them as it likes, perhaps in another way for another T.
    """
    values, found = values.clone(), []
    for _ in range(count):
        found.append(values.argmax(-1, keepdim=True))
        values.scatter_(-1, found[-1], -math.inf)
    return torch.cat(found, -1)


def normalized(scores: Tensor) -> Tensor:
    """scores [T, n] >= 0 -> the same summing to one in each row."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def weights_of(chosen: Tensor, moe: MoEConfig) -> Tensor:
    """Weights [T, k] from the scores of the chosen experts [T, k]."""
    return (normalized(chosen) if moe.renormalize else chosen) * moe.scale


@torch.no_grad()
def within_capacity(experts: Tensor, scores: Tensor, moe: MoEConfig) -> Tensor | None:
    """Which of the pairs [T, k] are among the ceil(factor * k * T / E) best of their expert; None: no limit.

    Best by scores [T, k]; of equal ones the first tokens stay.
    """
    if moe.capacity_factor is None:
        return None
    flat = experts.flatten()
    capacity = math.ceil(moe.capacity_factor * flat.numel() / moe.experts)
    order = scores.flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]  # by expert, within one by score
    counts = histogram(flat, moe.experts)
    starts = (counts.cumsum(0) - counts)[flat[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = torch.arange(len(flat), device=flat.device) - starts < capacity
    return kept.view_as(experts)


class _WideLinear(torch.autograd.Function):
    """x w^T in fp32 (fp64 in fp64), of which x and w are kept as they came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, in], weight [out, in] -> [T, out]."""
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        x, weight = ctx.saved_tensors
        d_weight = grad.t() @ x.to(grad.dtype)
        return (grad @ weight.to(grad.dtype)).to(x.dtype), d_weight.to(weight.dtype)


class _Attach(torch.autograd.Function):
    """x as it is; in the backward pass the loss gets the gradient 1, or the loss scale, as the objective does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        """x [...], loss [] and scale [] -> x."""
        ctx.one = torch.ones_like(loss) if scale is None else scale.to(loss.dtype, copy=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of x as it came."""
        return grad, ctx.one, None
