"""The contenders of benchmarks.step: each is a process of its own that makes one step whenever it is told to.

python -m benchmarks.step_workers NAME PRECISION THREADS     then a line on stdin a step; seconds on stdout
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from model.build import build
from model.compiled import compile_regions
from model.config import ModelConfig
from optim.config import OptimConfig
from optim.updater import Updater
from parallel.device import choose_matmul, keep_memory
from parallel.mesh import ONE_PROCESS
from parallel.precision import PrecisionConfig
from parallel.shards import shards_of

SHAPE = ModelConfig(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1536, vocab_size=8192)
SEQ_LEN, BATCH = 512, 4
TOKENS = SEQ_LEN * BATCH
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Step = Callable[[], object]


def sample_tokens() -> torch.Tensor:
    """[TOKENS] int64, the same for everyone."""
    return torch.randint(0, SHAPE.vocab_size or 0, (TOKENS,), generator=torch.Generator().manual_seed(0))


def tatara(dtype: torch.dtype, compiled: bool) -> Step:
    """Our step, as train.py makes it: fp32 masters, clipping, kept memory, the measured form of fp32 products."""
    keep_memory()
    if dtype == torch.float32:
        torch.set_float32_matmul_precision(choose_matmul(PrecisionConfig("fp32"), torch.device("cpu")).value)
    model = build(SHAPE, 0, torch.device("cpu"), torch.float32)
    updater = Updater(shards_of(model, ONE_PROCESS), OptimConfig(), dtype)
    if compiled:
        compile_regions(model, torch.device("cpu"))
    tokens = sample_tokens()
    positions, borders = torch.arange(SEQ_LEN).repeat(BATCH), torch.arange(0, TOKENS + 1, SEQ_LEN, dtype=torch.int32)

    def step() -> None:
        sums = model(tokens, tokens, positions, borders, SEQ_LEN, documents=False, scale=1 / TOKENS)
        sums.objective.backward()
        updater.step(1e-4).grad_norm.item()

    return step


def transformers_llama(dtype: torch.dtype, compiled: bool, keep: bool = False, masters: bool = False) -> Step:
    """transformers' Llama of the same shape with AdamW and clipping.

    Weights, gradients and moments are in `dtype` alone; with `masters` they are fp32, as ours, and `dtype` is autocast.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if keep:
        keep_memory()
    config = LlamaConfig(
        hidden_size=SHAPE.hidden, num_hidden_layers=SHAPE.layers, num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads, intermediate_size=SHAPE.ffn, vocab_size=SHAPE.vocab_size,
        max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32 if masters else dtype)
    call = torch.compile(model) if compiled else model

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=masters):
            return call(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    return _plain_step(model, loss)


def litgpt(dtype: torch.dtype, compiled: bool) -> Step:
    """litgpt's GPT of the same shape, where it is installed."""
    from litgpt import GPT, Config

    config = Config(
        n_layer=SHAPE.layers, n_head=SHAPE.heads, n_query_groups=SHAPE.kv_heads, n_embd=SHAPE.hidden,
        intermediate_size=SHAPE.ffn, vocab_size=SHAPE.vocab_size, padded_vocab_size=SHAPE.vocab_size,
        block_size=SEQ_LEN, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", rotary_percentage=1.0,
        parallel_residual=False,
    )  # fmt: skip
    model = GPT(config).to(dtype)
    call = torch.compile(model) if compiled else model
    return _plain_step(model, lambda ids: F.cross_entropy(call(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def _plain_step(model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """A step as one would write it by hand around a library's model."""
    ids = sample_tokens().view(BATCH, SEQ_LEN)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        loss(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        adamw.step()
        adamw.zero_grad()

    return step


def gemm_shapes() -> list[tuple[int, int, int]]:
    """(count, inner, columns) of the linears of a forward pass over TOKENS rows."""
    head_dim = SHAPE.hidden // SHAPE.heads
    qkv = (SHAPE.heads + 2 * SHAPE.kv_heads) * head_dim
    block = [(1, SHAPE.hidden, qkv), (1, SHAPE.hidden, SHAPE.hidden), (2, SHAPE.hidden, SHAPE.ffn)]
    block.append((1, SHAPE.ffn, SHAPE.hidden))
    return [(n * SHAPE.layers, k, c) for n, k, c in block] + [(1, SHAPE.hidden, SHAPE.vocab_size or 0)]


def gemm(dtype: torch.dtype, as_trained: bool = False) -> Step:
    """The products of a step's linears alone.

    All three of a linear in the form that is fastest: the limit. `as_trained`: x w^T, g w and g^T x, as a backward
    pass has its operands.
    """
    keep_memory()
    products: list[tuple[torch.Tensor, torch.Tensor]] = []
    for count, inner, columns in gemm_shapes():
        x, w, g = (torch.ones(s, dtype=dtype) for s in ((TOKENS, inner), (columns, inner), (TOKENS, columns)))
        products += count * ([(x, w.t()), (g, w), (g.t(), x)] if as_trained else 3 * [(x, w.t())])

    def step() -> None:
        for left, right in products:
            left @ right

    return step


def make(name: str, dtype: torch.dtype) -> Step:
    """The step of a contender by its name in the table."""
    contenders: dict[str, Callable[[], Step]] = {
        "tatara": lambda: tatara(dtype, False),
        "tatara compiled": lambda: tatara(dtype, True),
        "transformers": lambda: transformers_llama(dtype, False),
        "transformers compiled": lambda: transformers_llama(dtype, True),
        "transformers, memory kept": lambda: transformers_llama(dtype, False, keep=True),
        "transformers compiled, memory kept": lambda: transformers_llama(dtype, True, keep=True),
        "transformers, fp32 masters": lambda: transformers_llama(dtype, False, masters=True),
        "litgpt": lambda: litgpt(dtype, False),
        "litgpt compiled": lambda: litgpt(dtype, True),
        "gemm": lambda: gemm(dtype),
        "gemm as trained": lambda: gemm(dtype, as_trained=True),
    }
    return contenders[name]()


def main() -> None:
    """Make two steps, say their seconds, then the peak memory; from there on a step a line of stdin."""
    name, precision, threads = sys.argv[1:4]
    torch.manual_seed(0)
    torch.set_num_threads(int(threads))
    for library in ("transformers.models.llama.modeling_llama", "litgpt"):  # code is no memory of a model
        if name.startswith(library.split(".")[0]):
            importlib.import_module(library)
    before = _memory_gb("VmRSS")
    step = make(name, DTYPES[precision])
    for _ in range(2):
        _say("seconds", _timed(step))
    _say("memory", _memory_gb("VmHWM") - before)
    for _ in sys.stdin:
        _say("seconds", _timed(step))


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _memory_gb(what: str) -> float:
    """VmRSS: what is resident now; VmHWM: the most that ever was (Linux's own account of this process)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(what))


def _say(what: str, value: float) -> None:
    print(f"{what} {value}", flush=True)


if __name__ == "__main__":
    main()
