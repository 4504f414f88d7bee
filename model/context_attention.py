"""How queries meet keys and values that other context-parallel ranks hold: all gathered, or in a ring.

                 what moves                                       what a rank holds of keys and values
all_gather       an all-gather; back, a reduce-scatter            the whole sequence's
ring             each rank's to the next, cp - 1 times            its own, and two ranks' in buffers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from model.attention_kernels import Blocks, blocked_attention, causal_blocks, causal_segments, flash_takes
from model.ring_attention import MOST_KEYS, BlockProducts, FlashProducts, diagonal_borders, flash_steps, ring_attention
from parallel.context import chunk_length, gather_sequence, local_places, own_chunks
from parallel.mesh import Axis


@dataclass(frozen=True)
class SharedTokens:
    """A micro-batch of sequences of which this rank has two chunks each."""

    positions: Tensor
    """[B, seq_len / cp] int64 of this rank's tokens, restarting with each document."""
    cu_seqlens: Tensor
    """[D + 1] int32 borders of the documents in the whole sequences."""
    seq_len: int
    """Tokens of a whole sequence."""
    first: Tensor | None
    """[B, seq_len / cp] place of the first token that each of this rank's sees; None: plain causal."""
    window: int | None
    """Sliding window in tokens."""
    axis: Axis
    """The ranks that share each sequence."""


@dataclass(frozen=True)
class GatheredBlocks:
    """Keys and values of all ranks at once, by blocks."""

    heads_first: ClassVar[bool] = True
    axis: Axis
    blocks: Blocks

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, kv, S, g, d] scaled, k and v [B, kv, S, d] -> like q."""
        k, v = gather_sequence(torch.stack([k, v]), self.axis, 3).unbind(0)
        return blocked_attention(q, k, v, self.blocks)


@dataclass(frozen=True)
class RingBlocks:
    """Keys and values of one rank after the other, by blocks."""

    heads_first: ClassVar[bool] = True
    axis: Axis
    steps: tuple[Blocks, ...]
    """With the keys of this rank, of rank - 1 ..."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, kv, S, g, d] scaled, k and v [B, kv, S, d] -> like q."""
        folded, kv = q.flatten(0, 1).flatten(1, 2), torch.stack([k, v]).flatten(1, 2)
        products = BlockProducts(self.steps, batch=len(q), group=q.shape[3])
        return ring_attention(folded, kv, products, self.axis).view(q.shape)


@dataclass(frozen=True)
class GatheredFlash:
    """Keys and values of all ranks at once, by the flash kernel; this has not been run on hardware."""

    heads_first: ClassVar[bool] = False
    axis: Axis
    borders: tuple[tuple[Tensor, Tensor], ...]
    """For each chunk of queries, [segments + 1] int32 of its own and of the keys."""
    longest: tuple[int, int]
    """Tokens of a chunk and of a sequence."""
    window: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, heads, d], k and v [B, S, kv, d] -> like q."""
        k, v = gather_sequence(torch.stack([k, v]), self.axis, 2).flatten(1, 2).unbind(0)
        chunks = zip(_chunks(q), self.borders, strict=True)
        out = torch.stack([causal_segments(own, k, v, at, self.longest, self.window) for own, at in chunks])
        return _joined(out, q)


@dataclass(frozen=True)
class RingFlash:
    """Keys and values of one rank after the other, by the flash kernel; this has not been run on hardware."""

    heads_first: ClassVar[bool] = False
    axis: Axis
    products: FlashProducts

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, heads, d], k and v [B, S, kv, d] -> like q."""
        kv = torch.stack([_chunks(k), _chunks(v)])
        return _joined(ring_attention(_chunks(q), kv, self.products, self.axis), q)


Shared = GatheredBlocks | RingBlocks | GatheredFlash | RingFlash
"""`heads_first` says which layout `attend` takes."""


def share_attention(
    tokens: SharedTokens, exchange: Literal["ring", "all_gather"], dtype: torch.dtype, head_dim: int
) -> Shared:
    """The product for an exchange, a compute dtype and the tokens' device."""
    flash = flash_takes(tokens.positions.device, dtype, head_dim)
    if exchange == "ring":
        return _ring_flash(tokens) if flash else _ring_blocks(tokens, dtype)
    return _gathered_flash(tokens) if flash else _gathered_blocks(tokens, dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_shared(q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
    """Outside of compiled graphs, for its messages and for blocks that differ with the documents."""
    return shared.attend(q, k, v)


def _gathered_blocks(tokens: SharedTokens, dtype: torch.dtype) -> GatheredBlocks:
    every = torch.arange(tokens.seq_len, device=tokens.positions.device)
    return GatheredBlocks(tokens.axis, _meeting(tokens, every, dtype, None))


def _ring_blocks(tokens: SharedTokens, dtype: torch.dtype) -> RingBlocks:
    axis = tokens.axis
    sources = [Axis(axis.size, (axis.rank - step) % axis.size) for step in range(axis.size)]
    keys = [local_places(tokens.seq_len, source, tokens.positions.device) for source in sources]
    return RingBlocks(axis, tuple(_meeting(tokens, each, dtype, MOST_KEYS) for each in keys))


def _meeting(tokens: SharedTokens, keys: Tensor, dtype: torch.dtype, most_keys: int | None) -> Blocks:
    """Blocks of this rank's queries with keys at these places."""
    own = local_places(tokens.seq_len, tokens.axis, keys.device)
    length = chunk_length(tokens.seq_len, tokens.axis)
    return causal_blocks(own, keys, tokens.first, tokens.window, dtype, chunk=length, trim=True, most_keys=most_keys)


def _ring_flash(tokens: SharedTokens) -> RingFlash:
    steps = flash_steps(tokens.positions, tokens.cu_seqlens, tokens.seq_len, tokens.window, tokens.axis)
    return RingFlash(tokens.axis, FlashProducts(steps, chunk_length(tokens.seq_len, tokens.axis)))


def _gathered_flash(tokens: SharedTokens) -> GatheredFlash:
    """Each document, up to the end of the chunk of queries, is a segment; the queries have what falls into it."""
    whole, seq_len, length = tokens.cu_seqlens, tokens.seq_len, chunk_length(tokens.seq_len, tokens.axis)
    starts = torch.arange(len(tokens.positions), dtype=whole.dtype, device=whole.device) * seq_len
    borders = []
    for chunk in own_chunks(tokens.axis):
        keys = torch.cat([whole, starts + (chunk + 1) * length]).sort().values
        borders.append((diagonal_borders(keys, seq_len, chunk * length, length), keys))
    return GatheredFlash(tokens.axis, tuple(borders), (length, seq_len), tokens.window)


def _chunks(x: Tensor) -> Tensor:
    """[B, S, heads, d] -> [2, B * S / 2, heads, d]."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch, 2, tokens // 2, *rest).transpose(0, 1).flatten(1, 2)


def _joined(x: Tensor, like: Tensor) -> Tensor:
    """The way back."""
    batch, tokens, *rest = like.shape
    return x.view(2, batch, tokens // 2, *rest).transpose(0, 1).reshape(like.shape)
