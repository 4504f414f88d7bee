"""Models with experts: how large they are, and what a token's use of some of the experts costs."""

from dataclasses import replace

import pytest
import torch

from conf.compose import compose
from model.config import ModelConfig, MoEConfig
from model.flops import inactive_parameters, layer_weights, recomputed_flops, squared_lengths, step_flops
from model.transformer import Decoder, count_parameters

PUBLISHED = {"mixtral_8x7b": (46.7, 12.9), "qwen3_30b_a3b": (30.5, 3.3), "deepseek_moe_16b": (16.4, 2.8)}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_published_numbers_of_parameters(size):
    config = compose([f"model={size}"]).model
    total = count_parameters(config)
    whole, active = PUBLISHED[size]
    assert total / 1e9 == pytest.approx(whole, abs=0.05)
    assert (total - inactive_parameters(config)) / 1e9 == pytest.approx(active, abs=0.06)


def test_a_dense_model_has_no_inactive_parameters():
    assert inactive_parameters(ModelConfig()) == 0


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_step_costs_six_for_each_active_weight_of_a_linear_and_the_attention(size):
    config = compose([f"model={size}"]).model
    with torch.device("meta"):
        model = Decoder(config)
    outside = ("norm.weight", "router.weight", "embedding.weight")
    linears = sum(p.numel() for name, p in model.named_parameters() if not name.endswith(outside))
    padding = model.head_weight.numel() - config.hidden * (config.vocab_size or 0)
    weights = linears - padding - inactive_parameters(config)
    pairs = squared_lengths(torch.tensor([0, 512]), None)
    attention = 6 * config.layers * config.heads * (config.head_dim or config.hidden // config.heads) * pairs
    assert step_flops(config, 512, pairs) == 6 * 512 * weights + attention


EXPERTS = MoEConfig(experts=8, top_k=2, ffn=64, shared_ffn=32, first_dense=1, every=2)
MIXED = ModelConfig(layers=7, moe=EXPERTS)


@pytest.mark.parametrize("activation, products", [("swiglu", 3), ("gelu", 2)])
def test_dense_blocks_count_their_ffn_and_sparse_ones_the_experts_of_a_token(activation, products):
    config = replace(MIXED, activation=activation)
    sparse = [layer for layer in range(7) if EXPERTS.is_sparse(layer)]
    assert sparse == [1, 3, 5]
    attention = 256 * (256 + 2 * 128) + 256 * 256
    wanted = [attention + products * 256 * (160 if layer in sparse else 768) for layer in range(7)]
    assert [layer_weights(config, layer) for layer in range(7)] == wanted
    assert inactive_parameters(config) == 3 * 6 * products * 256 * 64


def test_recomputation_counts_the_blocks_that_are_made_again():
    pairs = 2 * 256 * 1000
    blocks = [2 * 100 * layer_weights(MIXED, layer) + pairs for layer in range(7)]
    for mode, wanted in {
        "none": 0, "selective": 7 * pairs, "full": sum(blocks), "every_n": blocks[0] + blocks[3] + blocks[6],
    }.items():  # fmt: skip
        assert recomputed_flops(MIXED, 100, 1000, mode, 3) == wanted
