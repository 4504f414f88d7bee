"""Models with experts equal those of transformers."""

import re
from typing import Any

import pytest
import torch

from errors import CheckpointRefused
from model.config import ModelConfig, MoEConfig
from model.hf import from_hf
from model.transformer import Decoder

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.1, "rope_theta": 10000.0,
}  # fmt: skip
OURS: dict[str, Any] = {
    "hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "vocab_size": 120, "norm_eps": 1e-5,
}  # fmt: skip
LENGTH = 150


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHAPE, intermediate_size=48, num_local_experts=6, num_experts_per_tok=2, sliding_window=None
    )
    ours = ModelConfig(**OURS, ffn=48, moe=MoEConfig(experts=6, top_k=2, ffn=48, balance="none"))
    return transformers.MixtralForCausalLM(config).eval(), ours


def qwen(renormalize=True):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=24, intermediate_size=96, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=renormalize, mlp_only_layers=[0],
    )  # fmt: skip
    moe = MoEConfig(experts=8, top_k=3, ffn=32, first_dense=1, renormalize=renormalize, balance="none")
    ours = ModelConfig(**OURS, head_dim=24, ffn=96, qk_norm=True, moe=moe)
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith(("gate.weight", "q_norm.weight", "k_norm.weight")):  # zeros and ones at first
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return theirs, ours


MODELS = {"Mixtral": mixtral, "Qwen3-MoE": qwen, "Qwen3-MoE without renormalising": lambda: qwen(False)}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_those_of_transformers_with_uneven_loads(make):
    theirs, config = make()
    model = Decoder(config)
    model.load_state_dict(from_hf(theirs.state_dict(), config))
    tokens = torch.randint(0, 120, (2, LENGTH))
    cu, positions = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32), torch.arange(LENGTH).repeat(2)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits.flatten(0, 1)
        ours = model.logits(tokens.flatten(), positions, cu, LENGTH, documents=False)
    assert (ours - wanted).abs().max() < 1e-5
    assert wanted.std() > 0.05, "the logits are not all alike"
    model.hidden_states(tokens.flatten(), positions, cu, LENGTH, documents=False)
    for router in model.routers.values():
        loads = router.tally[: config.moe.experts]
        assert loads.sum() == 2 * LENGTH * config.moe.top_k and loads.max() > 1.3 * loads.mean()


def published(state, names):
    """The same state with each expert under its number."""
    found = {}
    for name, tensor in state.items():
        stack = re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", name)
        if stack is None:
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            parts = one.chunk(2) if stack[2] == "gate_up" else [one]
            for part, kind in zip(parts, names[:2] if stack[2] == "gate_up" else names[2:], strict=True):
                found[f"{stack[1]}{number}.{kind}.weight"] = part
    return found


@pytest.mark.parametrize(
    "make, names, block",
    [(mixtral, ("w1", "w3", "w2"), "block_sparse_moe"), (qwen, ("gate_proj", "up_proj", "down_proj"), "mlp")],
)
def test_experts_under_their_numbers_are_the_same_as_stacked_ones(make, names, block):
    theirs, config = make()
    stacked = theirs.state_dict()
    apart = {name.replace(".mlp.", f".{block}."): t for name, t in published(stacked, names).items()}
    assert len(apart) > len(stacked)
    ours, wanted = from_hf(apart, config), from_hf(stacked, config)
    assert ours.keys() == wanted.keys() == Decoder(config).state_dict().keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_a_missing_expert_is_named():
    theirs, config = mixtral()
    state = published(theirs.state_dict(), ("w1", "w3", "w2"))
    del state["model.layers.1.mlp.experts.4.w3.weight"]
    with pytest.raises(CheckpointRefused, match=r"model\.layers\.1\.mlp\.experts\.4\.w3\.weight"):
        from_hf(state, config)
