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
class MoEConfig:
    """Blocks whose MLP is many experts, of which each token uses a few."""

    experts: int = 16
    """Experts a layer."""
    top_k: int = 4
    """Experts that a token uses."""
    ffn: int = 192
    """Width inside each expert, in features."""
    shared_ffn: int = 0
    """Width of an expert that every token uses besides, in features; 0: none."""
    first_dense: int = 0
    """Blocks from the first that keep the dense MLP of width model.ffn."""
    every: int = 1
    """Of the blocks behind those, one in so many is sparse, the first of them always."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores of experts."""
    renormalize: bool = True
    """Whether the weights of a token's experts are made to sum to one."""
    scale: float = 1.0
    """What the weights of a token's experts are multiplied by."""
    groups: int = 1
    """Groups that the experts are divided into."""
    groups_chosen: int = 1
    """Groups that a token may use; its groups are those whose two best experts score highest together."""
    balance: Literal["none", "bias", "sequence", "batch"] = "bias"
    """What evens out the experts' loads: bias is added to scores in the choice alone and follows the loads of the
    whole step; sequence and batch are losses over a sequence or over a rank's micro-batch (which depends on
    train.micro_batch)."""
    bias_rate: float = 1.0e-3
    """With balance=bias: how far a bias moves in a step, in units of the scores."""
    aux_coefficient: float | None = None
    """Coefficient of the balance loss; null: 1e-2 for batch, 1e-4 for sequence, 0 for bias (else the sequence loss is
    added to it)."""
    z_loss: float = 0.0
    """Coefficient of mean(logsumexp^2) of the router's logits, added to the loss; 0: off."""
    capacity_factor: float | None = None
    """Most tokens of an expert in a micro-batch on a rank, over its even share; those of lowest score are dropped
    (which depends on the layout); null: none are."""

    @property
    def balance_coefficient(self) -> float:
        """aux_coefficient with its null filled in."""
        usual = {"batch": 1e-2, "sequence": 1e-4}.get(self.balance, 0.0)
        return usual if self.aux_coefficient is None else self.aux_coefficient

    def is_sparse(self, layer: int) -> bool:
        """Whether the block of this number has experts."""
        return layer >= self.first_dense and (layer - self.first_dense) % self.every == 0


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
    """Width inside the dense MLP, in features."""
    moe: MoEConfig | None = None
    """Mixture of experts; null: every block is dense."""
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
