"""Shape of the decoder: what a model is, apart from how it is trained or cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies for longer contexts (Llama 3.1 report, section 3.4.2)."""

    factor: float = 8.0
    """How many times longer the context becomes (a ratio)."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_seq_len / this are fully stretched (a ratio)."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_seq_len / this are left alone (a ratio)."""
    original_seq_len: int = 8192
    """Context length before stretching, in tokens."""


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder-only Transformer."""

    name: str = "nano"
    """Short name of the size; goes into run.name."""
    hidden: int = 256
    """Width of the residual stream, in features."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Query heads a layer."""
    kv_heads: int = 2
    """Key and value heads a layer; heads must be a multiple of it."""
    head_dim: int | None = None
    """Features a head; null: hidden / heads."""
    ffn: int = 768
    """Width inside the MLP, in features."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """MLP kind: swiglu has a gate, gelu (tanh form) has none."""
    norm_eps: float = 1.0e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3 stretching of the rotary frequencies; null: none."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before rotation."""
    bias: bool = False
    """Additive bias in the attention and MLP linears."""
    tied_embeddings: bool = False
    """The head uses the embedding's weight."""
    window: int | None = None
    """Sliding window: how many latest tokens a token sees, itself included; null: all before it."""
    vocab_size: int | None = None
    """Entries that may be predicted; null: the tokenizer's."""
    vocab_multiple: int = 128
    """The embedding's and head's rows are padded to a multiple of this, whatever the layout."""
    init_std: float = 0.02
    """Standard deviation of initial weights; the two output linears of a block get this / sqrt(2 layers)."""
    z_loss: float = 0.0
    """Coefficient of mean(logsumexp^2), added to the loss; 0: off."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at one time in the loss."""
