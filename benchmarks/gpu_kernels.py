"""What `benchmarks.gpu_check` asks of attention, the ring's flash calls and grouped experts: right, and how fast.

Values and gradients are held against plain formulas in fp32 on the same bf16 numbers; an error is
||difference|| / ||value||.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_sections import Figure, Setting, release, seconds_of
from model.attention import Attention, attention_context
from model.attention_kernels import causal_segments
from model.config import ModelConfig, MoEConfig
from model.context_attention import GatheredFlash, RingFlash, _chunks, _joined
from model.experts import Experts, ExpertsInTurn, GroupedExperts
from model.ring_attention import FlashProducts, Saved
from model.rope import inverse_wavelengths
from parallel.context import local_places, local_share
from parallel.cuts import Cuts
from parallel.mesh import Axis

# Of a whole tensor: a bf16 number is 2^-9 off at most, and a result passes through a few roundings.
# TF32 would be 5e-4 off: it is not to be taken for fp32.
ATTENTION = {torch.bfloat16: 2e-2, torch.float32: 5e-5}
RING = 2e-2
EXPERTS = 2e-2
GROUPED_TIME = 1.0  # most of the time in turn: else the grouped product is not worth its path
_DTYPE = torch.bfloat16
_THETA = 10000.0


@dataclass(frozen=True)
class Case:
    """Queries, keys and what they may see."""

    seq_len: int
    """Tokens of a sequence."""
    batch: int = 2
    """Sequences."""
    heads: int = 8
    """Query heads."""
    kv: int = 2
    """Key and value heads."""
    dim: int = 64
    """Features a head."""
    documents: int = 0
    """Borders drawn at random besides those of the sequences; 0: no documents are masked."""
    window: int | None = None
    """Latest tokens a token sees."""

    def borders(self) -> Tensor:
        """[D + 1] int32."""
        tokens = self.batch * self.seq_len
        drawn = torch.randint(1, tokens, (self.documents,), generator=torch.Generator().manual_seed(0))
        every: Tensor = torch.cat([torch.arange(0, tokens + 1, self.seq_len), drawn]).unique()
        return every.to(torch.int32)

    def positions(self) -> Tensor:
        """[T] int64, from the start of each document."""
        borders = self.borders().long()
        starts = torch.repeat_interleave(borders[:-1], borders.diff())
        return torch.arange(self.batch * self.seq_len) - starts

    def visible(self) -> Tensor:
        """[B, S, S] bool: which key each query sees."""
        at = torch.arange(self.seq_len)
        back = at[:, None] - at
        reach = self.positions().view(self.batch, self.seq_len, 1)
        seen = (back >= 0) & (back <= reach)
        return seen if self.window is None else seen & (back < self.window)

    def random(self, heads: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[B, S, heads, d], the same on every device."""
        shape = (self.batch, self.seq_len, heads, self.dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def cases(seq_len: int) -> dict[str, Case]:
    """What is masked, by name."""
    return {
        "causal": Case(seq_len),
        "one query head a KV head": Case(seq_len, kv=8),
        "documents": Case(seq_len, documents=12),
        "window": Case(seq_len, window=seq_len // 3),
        "documents and window": Case(seq_len, documents=6, window=seq_len // 5 + 1),
    }


def error(found: Tensor, wanted: Tensor) -> float:
    """||difference|| / ||wanted||; where that is zero, the norm of what was found."""
    found, wanted = found.detach().double(), wanted.detach().double()
    difference, size = (found - wanted).norm(), wanted.norm()
    return float(difference / torch.where(size == 0, 1.0, size))


def worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error; what is no number stays none."""
    return torch.tensor([error(a, b) for a, b in zip(found, wanted, strict=True)]).max().item()


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [B, S, heads, d], k and v [B, S, kv, d], visible [B, S, S] -> like q: every pair, by matrix products."""
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible[:, None], enable_gqa=True
        )
    return out.transpose(1, 2)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, S, heads, d] rotated by its positions [T], in fp32."""
    angle = positions.to(x.device)[:, None] * inverse_wavelengths(x.shape[-1], _THETA).to(x.device)
    cos, sin = (t.float().view(*x.shape[:2], 1, -1) for t in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def core_of(case: Case, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The project's attention between its two linears: qkv [B, S, kv, g + 2, d] -> [T, heads * d]."""
    shape = ModelConfig(
        hidden=case.heads * case.dim, heads=case.heads, kv_heads=case.kv, head_dim=case.dim, window=case.window
    )
    module = Attention(shape, Cuts(), device)
    freq = inverse_wavelengths(case.dim, _THETA).to(device)
    context = attention_context(
        case.positions().to(device), case.borders().to(device), case.seq_len, freq,
        dtype=dtype, window=case.window, documents=case.documents > 0,
    )  # fmt: skip

    def core(qkv: Tensor) -> Tensor:
        return module._core(qkv, context)

    return core


def qkv_of(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B, S, kv, g + 2, d], a leaf."""
    rows = case.kv * (case.heads // case.kv + 2)
    flat = case.random(rows, 0, dtype, device)
    return flat.view(case.batch, case.seq_len, case.kv, -1, case.dim).requires_grad_()


def _attention_error(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Of the output and of the gradients of queries, keys and values."""
    qkv = qkv_of(case, dtype, device)
    grad = case.random(case.heads, 1, dtype, device)
    out = core_of(case, dtype, device)(qkv)
    (found,) = torch.autograd.grad(out, qkv, grad.view_as(out))
    wide = qkv.detach().float().requires_grad_()
    q, k, v = wide.split([case.heads // case.kv, 1, 1], 3)
    q, k = turned(q.flatten(2, 3), case.positions()), turned(k.squeeze(3), case.positions())
    reference = plain(q, k, v.squeeze(3), case.visible().to(device))
    (wanted,) = torch.autograd.grad(reference, wide, grad.float())
    sizes = [case.heads // case.kv, 1, 1]
    return worst([out.view_as(reference), *found.split(sizes, 3)], [reference, *wanted.split(sizes, 3)])


def attention(setting: Setting) -> Iterator[Figure]:
    """The core against plain products in fp32, and its speed at the 1b shape's heads."""
    for name, case in cases(128 if setting.quick else 1024).items():
        for dtype, label in ((_DTYPE, "bf16"), (torch.float32, "fp32")):
            yield Figure(f"{name}, {label}: error", _attention_error(case, dtype, setting.device), "", ATTENTION[dtype])
    long = Case(4096, batch=4, heads=32, kv=8) if setting.on_cuda else Case(256)
    for name, case in {"causal": long, "window": Case(**{**vars(long), "window": long.seq_len // 4})}.items():
        seconds = _attention_seconds(case, setting)
        yield Figure(f"{name}: forward and backward of {case.batch} x {case.seq_len}", 1e3 * seconds, "ms")
        seen = case.seq_len if case.window is None else case.window
        pairs = case.batch * (2 * seen * case.seq_len - seen * seen)  # as model/flops.py counts them
        yield Figure(f"{name}: speed", 6 * case.heads * case.dim * pairs / seconds / 1e12, "TFLOP/s")


def _attention_seconds(case: Case, setting: Setting) -> float:
    """Time of the core forward and backward, rotation included."""
    qkv, core = qkv_of(case, _DTYPE, setting.device), core_of(case, _DTYPE, setting.device)
    grad = case.random(case.heads, 1, _DTYPE, setting.device).flatten(0, 1).flatten(1)
    return seconds_of(lambda: torch.autograd.grad(core(qkv), qkv, grad), setting.device, 3 if setting.quick else 20)


@dataclass(frozen=True)
class Load:
    """Rows for experts."""

    counts: tuple[int, ...]
    """Rows of each expert."""
    hidden: int
    """Features of a row."""
    width: int
    """Features inside an expert."""

    def experts(self, dtype: torch.dtype, device: torch.device) -> Experts:
        """With weights, the same on every device."""
        moe = MoEConfig(experts=len(self.counts), top_k=1, ffn=self.width)
        module = Experts(ModelConfig(hidden=self.hidden, heads=4, kv_heads=4, moe=moe), Cuts())
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in module.parameters():  # rounded to bf16, so that both dtypes have the same numbers
                weight.normal_(0.0, weight.shape[2] ** -0.5, generator=generator).copy_(weight.to(_DTYPE))
        return module.to(device, dtype)

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [M, h] and weights [M], leaves, and a gradient [M, h]."""
        count, generator = sum(self.counts), torch.Generator().manual_seed(1)
        rows, grad = torch.randn(2, count, self.hidden, generator=generator).to(_DTYPE).to(device, dtype)
        weights = torch.rand(count, generator=generator).to(_DTYPE).to(device, dtype)
        return rows.detach().requires_grad_(), weights.requires_grad_(), grad


def pass_of(load: Load, grouped: bool, dtype: torch.dtype, device: torch.device) -> Callable[[], list[Tensor]]:
    """A forward and backward pass: output, gradients of rows, weights, gate_up and down."""
    module, (rows, weights, grad) = load.experts(dtype, device), load.inputs(dtype, device)
    counts = torch.tensor(load.counts, device=device)
    ends = counts.cumsum(0).to(torch.int32)
    leaves = [rows, weights, module.gate_up, module.down]

    def run() -> list[Tensor]:
        function, where = (GroupedExperts, ends) if grouped else (ExpertsInTurn, list(load.counts))
        out = cast(Tensor, function.apply(*leaves, where, module.gated, None))
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return run


def experts(setting: Setting) -> Iterator[Figure]:
    """Grouped products in bf16 against one expert after the other in fp32, idle experts among them; and the time."""
    rows, hidden, width = (64, 64, 32) if setting.quick else (512, 256, 128)
    loads = {
        "even loads": (rows,) * 4,
        "idle experts": (0, rows, 0, 0, rows + 3, 1, 0, 2 * rows, 0),
        "all to one": (0, 0, 4 * rows, 0),
    }
    for name, counts in loads.items():
        load = Load(counts, hidden, width)
        wanted = pass_of(load, False, torch.float32, setting.device)()
        found = pass_of(load, True, _DTYPE, setting.device)()
        yield Figure(f"{name}, grouped: error", worst(found, wanted), "", EXPERTS)
        turn = pass_of(load, False, _DTYPE, setting.device)()
        yield Figure(f"{name}, in turn: error", worst(turn, wanted), "", EXPERTS)
        idle = [made[number].abs().max() for made in found[3:] for number, count in enumerate(counts) if not count]
        if idle:
            yield Figure(f"{name}: largest gradient of an idle expert", torch.stack(idle).max().item(), "", 0.0)
    yield from _experts_time(setting)


def _experts_time(setting: Setting) -> Iterator[Figure]:
    """Uneven loads, some idle; on a GPU 32,768 rows for 64 experts."""
    release()
    count, mean, hidden, width = (64, 512, 2048, 1024) if setting.on_cuda else (8, 32, 64, 32)
    load = Load(tuple(mean * (number % 3) for number in range(count)), hidden, width)
    flops, seconds = 18.0 * sum(load.counts) * hidden * width, {}
    for grouped, label in ((True, "grouped"), (False, "in turn")):
        run = pass_of(load, grouped, _DTYPE, setting.device)
        seconds[label] = seconds_of(run, setting.device, 3 if setting.quick else 10)
        yield Figure(f"{label}: forward and backward of {sum(load.counts)} rows", 1e3 * seconds[label], "ms")
        yield Figure(f"{label}: speed", flops / seconds[label] / 1e12, "TFLOP/s")
    limit = GROUPED_TIME if setting.on_cuda else None
    yield Figure("time grouped / in turn", seconds["grouped"] / seconds["in turn"], "", limit)


def ring(setting: Setting) -> Iterator[Figure]:
    """The flash kernel's calls of all context-parallel ranks, played in one process, against whole attention."""
    chosen = cases(256 if setting.quick else 1024)
    for name, case in chosen.items():
        for ranks in (2, 4):
            for exchange, play in (("ring", played_ring), ("all-gather", played_gather)):
                label = f"cp={ranks}, {exchange}, {name}: error"
                yield Figure(label, shared_error(case, ranks, play, _DTYPE, setting.device), "", RING)


Played = Callable[[Case, int, Sequence[Tensor]], list[Tensor]]
"""(case, ranks, [q, k, v, grad]) -> output and gradients of q, k and v, whole."""


def shared_error(case: Case, ranks: int, play: Played, dtype: torch.dtype, device: torch.device) -> float:
    """Of the output and of the gradients of q, k and v, no part of the sequence left out."""
    heads = (case.heads, case.kv, case.kv, case.heads)
    tensors = [case.random(count, seed, dtype, device) for seed, count in enumerate(heads)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [t.to(wide).requires_grad_() for t in tensors[:3]]
    out = plain(leaves[0], leaves[1], leaves[2], case.visible().to(device))
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(wide))]
    return worst(play(case, ranks, tensors), wanted)


def shared_of(case: Case, axis: Axis, exchange: str, like: Tensor) -> RingFlash | GatheredFlash:
    """What a rank's layers would be given."""
    device = like.device
    shared = attention_context(
        local_share(case.positions().to(device), case.seq_len, axis), case.borders().to(device), case.seq_len,
        inverse_wavelengths(case.dim, _THETA).to(device), dtype=like.dtype, window=case.window,
        documents=case.documents > 0, cp=axis, exchange="ring" if exchange == "ring" else "all_gather",
    ).shared  # fmt: skip
    if not isinstance(shared, RingFlash | GatheredFlash):
        raise TypeError(f"the flash kernel is not used for {like.dtype} on {device}, but {type(shared).__name__}")
    return shared


def played_ring(case: Case, ranks: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's steps one after the other, as `model.ring_attention` makes them around its messages."""
    q, k, v, grad = tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    places = [local_places(case.seq_len, Axis(ranks, rank), q.device) for rank in range(ranks)]
    kv = [torch.stack([_chunks(k[:, at]), _chunks(v[:, at])]) for at in places]
    out, dq, dk, dv = (torch.full_like(t, torch.nan, dtype=wide) for t in (q, q, k, v))
    dkv = [torch.zeros_like(each, dtype=wide) for each in kv]
    for rank, at in enumerate(places):
        shared = shared_of(case, Axis(ranks, rank), "ring", q)
        products = cast(RingFlash, shared).products
        sources = [(rank - step) % ranks for step in range(ranks)]
        mine = _chunks(q[:, at]).contiguous(), _chunks(grad[:, at]).contiguous()
        made, d_mine = _rank_steps(products, *mine, [kv[s] for s in sources], [dkv[s] for s in sources])
        out[:, at], dq[:, at] = _joined(made, q[:, at]), _joined(d_mine, q[:, at])
    for each, at in zip(dkv, places, strict=True):
        dk[:, at], dv[:, at] = _joined(each[0], k[:, at]), _joined(each[1], v[:, at])
    return [out, dq, dk, dv]


def _rank_steps(
    products: FlashProducts, q: Tensor, grad: Tensor, kv: Sequence[Tensor], dkv: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Output and gradient of q [2, B*c, heads, d], fp32 at least; the gradients of keys and values are added to dkv."""
    out, lse = torch.zeros_like(q, dtype=dkv[0].dtype), products.lse_like(q).fill_(float("-inf"))
    for step, each in enumerate(kv):
        products.attend(step, q, each, out, lse)
    rounded = out.to(q.dtype)
    saved, dq = Saved(q, rounded, lse, grad), torch.zeros_like(out)
    for step, (each, sums) in enumerate(zip(kv, dkv, strict=True)):
        products.differentiate(step, saved, each, dq, sums)
    return rounded, dq


def played_gather(case: Case, ranks: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's queries with all keys and values, as `GatheredFlash.attend` does once they are there."""
    *leaves, grad = (t.detach().clone().requires_grad_() for t in tensors)
    q, k, v = leaves
    out = torch.full_like(q, torch.nan)
    for rank in range(ranks):
        axis = Axis(ranks, rank)
        shared = cast(GatheredFlash, shared_of(case, axis, "all_gather", q))
        at = local_places(case.seq_len, axis, q.device)
        own, keys, values = q[:, at], k.flatten(0, 1), v.flatten(0, 1)
        chunks = zip(_chunks(own), shared.borders, strict=True)
        made = [causal_segments(each, keys, values, b, shared.longest, shared.window) for each, b in chunks]
        out = out.index_copy(1, at, _joined(torch.stack(made), own))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]
