"""Weights of Hugging Face's Llama, Mixtral, Qwen3 and Qwen3-MoE models under our names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from errors import CheckpointRefused
from model.config import ModelConfig, MoEConfig
from model.transformer import padded_vocabulary

State = Mapping[str, Tensor]

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
_HEAD_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
_MLP = {"gate.weight": "gate_proj.weight", "up.weight": "up_proj.weight", "down.weight": "down_proj.weight"}
_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's gate, up and down: Qwen's and Mixtral's."""


def from_hf(state: State, config: ModelConfig) -> dict[str, Tensor]:
    """Our decoder's state dict from that of a model for causal language modelling.

    Args:
        state: names such as `model.layers.0.self_attn.q_proj.weight`; experts stacked, as transformers has them in
            memory (`mlp.experts.gate_up_proj`), or each under its number, as they are published.
        config: the same shape, without biases; vocab_size filled in.

    Raises:
        CheckpointRefused: a tensor is missing.
    """
    rows = padded_vocabulary(config)
    ours = {"embedding.weight": _padded(_take(state, "model.embed_tokens.weight"), rows)}
    ours["norm.weight"] = _take(state, "model.norm.weight")
    if not config.tied_embeddings:
        ours["head.weight"] = _padded(_take(state, "lm_head.weight"), rows)
    for layer in range(config.layers):
        theirs = f"model.layers.{layer}."
        block = _attention(state, theirs, config)
        if config.moe is not None and config.moe.is_sparse(layer):
            block |= _mixture(state, theirs, config.moe)
        else:
            block |= _renamed(state, f"{theirs}mlp.", _MLP, "mlp.")
        ours |= {f"layers.{layer}.{name}": tensor for name, tensor in block.items()}
    return ours


def _attention(state: State, prefix: str, config: ModelConfig) -> dict[str, Tensor]:
    """A block's attention and both of its norms."""
    found = _renamed(state, prefix, _BLOCK | (_HEAD_NORMS if config.qk_norm else {}))
    parts = [_take(state, f"{prefix}self_attn.{letter}_proj.weight") for letter in "qkv"]
    return found | {"attention.qkv.weight": _grouped(parts, config.kv_heads)}


def _mixture(state: State, prefix: str, moe: MoEConfig) -> dict[str, Tensor]:
    """A block's router, experts and shared expert."""
    published = f"{prefix}block_sparse_moe."  # Mixtral's name
    prefix = published if f"{published}gate.weight" in state else f"{prefix}mlp."
    bias = state.get(f"{prefix}gate.e_score_correction_bias", torch.zeros(moe.experts))
    found = {"mlp.router.weight": _take(state, f"{prefix}gate.weight"), "mlp.router.balance": bias}
    found |= _experts(state, f"{prefix}experts.", moe.experts)
    if moe.shared_ffn:
        found |= _renamed(state, f"{prefix}shared_experts.", _MLP, "mlp.shared.")
    return found


def _experts(state: State, prefix: str, count: int) -> dict[str, Tensor]:
    """gate_up [E, 2f, h] and down [E, h, f], from stacks or from each expert's own."""
    if f"{prefix}gate_up_proj" in state:
        return _renamed(state, prefix, {"gate_up": "gate_up_proj", "down": "down_proj"}, "mlp.experts.")
    gate, up, down = next((names for names in _EXPERT if f"{prefix}0.{names[0]}.weight" in state), _EXPERT[0])
    stacks = [
        torch.stack([_take(state, f"{prefix}{number}.{name}.weight") for number in range(count)])
        for name in (gate, up, down)
    ]
    return {"mlp.experts.gate_up": torch.cat(stacks[:2], dim=1), "mlp.experts.down": stacks[2]}


def _renamed(state: State, prefix: str, names: Mapping[str, str], own: str = "") -> dict[str, Tensor]:
    """Tensors of which the name alone changes: ours to theirs in `names`."""
    return {own + ours: _take(state, prefix + theirs) for ours, theirs in names.items()}


def _take(state: State, name: str) -> Tensor:
    if name not in state:
        raise CheckpointRefused(f"no tensor {name} among the {len(state)} given; this is not such a model's state")
    return state[name]


def _padded(table: Tensor, rows: int) -> Tensor:
    """[vocab, hidden] with zero rows below, [rows, hidden]."""
    return torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])


def _grouped(parts: list[Tensor], kv_heads: int) -> Tensor:
    """q, k and v rows regrouped by KV head: its queries, its key, its value."""
    by_head = [part.view(kv_heads, -1, part.shape[-1]) for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 1)
