"""Weights of Hugging Face Llama models under our names and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from errors import CheckpointRefused
from model.config import ModelConfig
from model.transformer import padded_vocabulary

_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def from_llama(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our decoder's state dict from a `LlamaForCausalLM`'s.

    Args:
        state: names such as `model.layers.0.self_attn.q_proj.weight`.
        config: the same shape, without biases or QK-norm; vocab_size filled in.

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
        for own, other in _BLOCK.items():
            ours[f"layers.{layer}.{own}"] = _take(state, theirs + other)
        parts = [_take(state, f"{theirs}self_attn.{letter}_proj.weight") for letter in "qkv"]
        ours[f"layers.{layer}.attention.qkv.weight"] = _grouped(parts, config.kv_heads)
    return ours


def _take(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise CheckpointRefused(f"no tensor {name} among the {len(state)} given; this is not a Llama model's state")
    return state[name]


def _padded(table: Tensor, rows: int) -> Tensor:
    """[vocab, hidden] with zero rows below, [rows, hidden]."""
    return torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])


def _grouped(parts: list[Tensor], kv_heads: int) -> Tensor:
    """q, k and v rows regrouped by KV head: its queries, its key, its value."""
    by_head = [part.view(kv_heads, -1, part.shape[-1]) for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 1)
