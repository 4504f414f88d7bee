"""How fast is a mixture of experts? Beside transformers' Qwen3-MoE block, and as a share of its products' limit.

python -m benchmarks.moe [--tokens 4096] [--rounds 15] [--json FILE]

The whole layer forward and backward in bf16 on two threads: router, permutation, experts, combine. All contenders
have the same weights and read the same tokens, in one process (with our allocator's settings for all), in turns of
random order: new tokens in every pass, as in training, and the same ones again and again. The difference is what a
library makes anew for each number of rows that an expert gets. Others' work on the machine only ever adds time, so a
contender's figure is the median of the fastest third of its turns; the median of all stands beside it. `products` is
the limit: the experts' matrix products alone, nine to an expert, with loads as even as can be.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from errors import ConfigRefused, exit_code_of
from model.attention import attention_context
from model.config import ModelConfig, MoEConfig
from model.context import BlockContext
from model.moe import MoE
from parallel.cuts import Cuts
from parallel.device import set_up_machine
from parallel.precision import PrecisionConfig

HIDDEN, FFN, EXPERTS, TOP_K = 512, 256, 16, 4
Layer = Callable[[Tensor], Tensor]


def ours(generator: torch.Generator) -> tuple[Layer, MoE]:
    """Our layer, without a balance loss, as the other has none."""
    moe = MoEConfig(experts=EXPERTS, top_k=TOP_K, ffn=FFN, balance="none")
    layer = MoE(ModelConfig(hidden=HIDDEN, heads=8, kv_heads=8, moe=moe), Cuts()).to(torch.bfloat16)
    layer.router.reset_buffers()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.02, generator=generator)
    positions = torch.arange(8)
    attention = attention_context(
        positions, torch.tensor([0, 8], dtype=torch.int32), 8, torch.ones(1, dtype=torch.float64), dtype=torch.bfloat16
    )
    context = BlockContext(attention, 8, 0.0)
    return lambda x: layer(x, context), layer


def theirs(layer: MoE, implementation: str) -> tuple[Layer, nn.Module]:
    """transformers' layer with the same weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, hidden_act="silu",
    )  # fmt: skip
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(layer.experts.gate_up)
        block.experts.down_proj.copy_(layer.experts.down)
    return lambda x: block(x[None])[0], block


def products(tokens: int) -> Callable[[], None]:
    """The experts' products alone: forward, for the gradients of the rows, for those of the weights."""
    rows = tokens * TOP_K // EXPERTS
    x, up, act, down = (
        torch.randn(EXPERTS, *shape, dtype=torch.bfloat16)
        for shape in ((rows, HIDDEN), (2 * FFN, HIDDEN), (rows, FFN), (HIDDEN, FFN))
    )

    def run() -> None:
        for xe, ue, ae, de in zip(x, up, act, down, strict=True):
            wide, narrow = xe @ ue.t(), ae @ de.t()
            _ = wide @ ue, narrow @ de
            _ = wide.t() @ xe, narrow.t() @ ae

    return run


def turn(layer: Layer, module: nn.Module, inputs: tuple[Tensor, Tensor], grad: Tensor) -> tuple[float, Tensor]:
    """Seconds of a forward and backward pass that follow another, and what came out."""
    for x in inputs:
        module.zero_grad(set_to_none=True)
        x.grad = None
        begin = time.perf_counter()
        out = layer(x)
        out.backward(grad)
        seconds = time.perf_counter() - begin
    return seconds, out.detach()


def measure(tokens: int, rounds: int, fresh: bool) -> dict[str, list[float]]:
    """Seconds of every turn by contender; fresh: with new tokens in every pass."""
    set_up_machine("cpu", 0, 2, 1, PrecisionConfig("bf16"), 1.0, "highest", lambda _: None)
    generator = torch.Generator().manual_seed(0)
    own, module = ours(generator)
    contenders = {"tatara": (own, module)} | {
        f"transformers {name}": theirs(module, name) for name in ("grouped_mm", "eager")
    }

    def drawn() -> Tensor:
        return torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16).requires_grad_()

    x = drawn()
    grad = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in (*contenders, "products")}
    limit, outputs = products(tokens), {}
    for _ in range(rounds):
        inputs = (drawn(), drawn()) if fresh else (x, x)
        for name in random.sample(list(seconds), len(seconds)):
            if name == "products":
                begin = time.perf_counter()
                limit()
                seconds[name].append(time.perf_counter() - begin)
            else:
                layer, block = contenders[name]
                taken, outputs[name] = turn(layer, block, inputs, grad)
                seconds[name].append(taken)
    for name, out in outputs.items():
        error = ((out - outputs["tatara"]).float().norm() / out.float().norm()).item()
        if error > 5e-2:  # bf16, and their router chooses by bf16 logits
            raise ConfigRefused(f"{name} computes something else: relative difference {error:.1e}")
    return seconds


def quiet(samples: list[float]) -> float:
    """Median of the fastest third."""
    return statistics.median(sorted(samples)[: max(1, len(samples) // 3)])


def report(seconds: dict[str, list[float]], tokens: int, words: str) -> dict[str, float]:
    """Print the table; the ratios."""
    figures = {name: quiet(samples) for name, samples in seconds.items()}
    print(f"{tokens} tokens, hidden {HIDDEN}, {EXPERTS} experts of {FFN}, top {TOP_K}, bf16, both passes: {words}")
    for name, figure in figures.items():
        print(f"{name:>24}  {1e3 * figure:8.1f} ms   (median of all {1e3 * statistics.median(seconds[name]):8.1f})")
    fastest = min(figure for name, figure in figures.items() if name.startswith("transformers"))
    ratios = {
        "speed over the faster of transformers'": fastest / figures["tatara"],
        "share of the experts' product limit": figures["products"] / figures["tatara"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    return ratios


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a pass (4096)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (15)")
    parser.add_argument("--json", type=Path, help="also write all times here")
    options = parser.parse_args(argv)

    def run() -> None:
        figures = {}
        for words, fresh in (("new tokens in every pass", True), ("the same tokens in every pass", False)):
            seconds = measure(options.tokens, options.rounds, fresh)
            figures[words] = {"seconds": seconds, "ratios": report(seconds, options.tokens, words)}
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))

    return exit_code_of(run)


if __name__ == "__main__":
    raise SystemExit(main())
