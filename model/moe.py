"""A mixture of experts in the place of a block's MLP: route, send tokens to their experts, compute, bring back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.context import BlockContext
from model.experts import Experts
from model.mlp import MLP
from model.router import Router
from parallel.cuts import Cuts
from parallel.expert import dispatch, sort_pairs
from parallel.recompute import recomputed


class MoE(nn.Module):
    """x [T, hidden], this rank's tokens (T counts them after cp and tp have shared them out) -> [T, hidden]."""

    def __init__(self, config: ModelConfig, cuts: Cuts, device: torch.device | None = None) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("model.moe is null: there are no experts to make")
        self.count, self.ep, self.fp8 = config.moe.experts, cuts.ep, cuts.fp8
        self.router = Router(config, cuts, device)
        self.experts = Experts(config, cuts, device)
        shared = replace(config, ffn=config.moe.shared_ffn)
        self.shared = MLP(shared, cuts.linears("mlp"), device) if config.moe.shared_ffn else None
        self.recompute = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # rows to each rank are known on the host alone
    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """x [T, hidden] -> [T, hidden].

        Routing and exchanges are outside of what is recomputed: their outcome is kept, whatever a second pass
        would round otherwise. While rows are on their way the shared expert works.
        """
        routing = self.router(x, context)
        pairs = sort_pairs(routing.experts, routing.kept, self.count)
        sent = dispatch(x, routing.weights.to(x.dtype), pairs, self.ep)
        shared = None if self.shared is None else self._shared(self.shared, x)
        rows, weights, counts = sent.arrived()
        out = sent.collect(self.experts(rows, weights, counts))
        return out if shared is None else out + shared

    def _shared(self, module: MLP, x: Tensor) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return module(x)  # type: ignore[no-any-return]
        return recomputed(module, x, fp8=self.fp8)  # type: ignore[no-any-return]
