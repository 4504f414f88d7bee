"""The decoder as a whole: who sees whom, how large it is, and that it equals Llama."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from model.build import build
from model.config import ModelConfig, RopeScaling
from model.flops import squared_lengths, step_flops
from model.hf import from_hf
from model.transformer import Decoder, count_parameters

TINY = ModelConfig(hidden=48, layers=2, heads=4, kv_heads=2, ffn=64, vocab_size=90)
CPU = torch.device("cpu")


def positions_of(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


def logits_of(model, tokens, lengths, documents):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return model.logits(tokens, positions_of(lengths), cu, len(tokens), documents=documents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_the_document_mask_one_document_never_reaches_another(dtype):
    model = build(TINY, 1, CPU, dtype)
    tokens = torch.randint(0, 90, (600,), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:350] = (changed[:350] + 1) % 90
    with torch.no_grad():
        masked = [logits_of(model, t, [350, 250], True) for t in (tokens, changed)]
        open_ = [logits_of(model, t, [600], False) for t in (tokens, changed)]
    assert torch.equal(masked[0][350:], masked[1][350:])
    assert not torch.equal(masked[0][:350], masked[1][:350])
    assert not torch.equal(open_[0][350:], open_[1][350:])


def test_a_document_alone_and_one_among_others_give_the_same_logits():
    model = build(TINY, 1, CPU, torch.float64)
    tokens = torch.randint(0, 90, (400,))
    together = logits_of(model, tokens, [150, 250], True)
    alone = logits_of(model, tokens[150:], [250], True)
    torch.testing.assert_close(together[150:], alone)


PUBLISHED = {"1b": 1.2358, "3b": 3.2127, "8b": 8.03, "70b": 70.55, "405b": 405.85}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_have_the_published_number_of_parameters(size):
    model = compose([f"model={size}"]).model
    assert count_parameters(model) / 1e9 == pytest.approx(PUBLISHED[size], abs=0.005)


@pytest.mark.parametrize("size, millions", [("nano", 7.3), ("125m", 91), ("350m", 311)])
def test_small_sizes_are_near_their_names(size, millions):
    model = replace(compose([f"model={size}"]).model, vocab_size=8192)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=0.02)


def test_every_size_file_is_buildable():
    for file in Path("conf/model").glob("*.yaml"):
        config = compose([f"model={file.stem}"]).model
        assert config.name == file.stem
        with torch.device("meta"):
            Decoder(replace(config, vocab_size=config.vocab_size or 8192))


def test_flops_of_llama_3_8b_equal_the_golden_value():
    config = compose(["model=8b"]).model
    one = step_flops(config, 8192, squared_lengths(torch.tensor([0, 8192]), None))
    assert one / 8192 / 1e9 == pytest.approx(51.47, rel=1e-3)


def test_flops_count_each_segment_and_window_on_its_own():
    borders = torch.tensor([0, 10, 30, 130])
    assert squared_lengths(borders, None) == 10**2 + 20**2 + 100**2
    assert squared_lengths(borders, 16) == 10**2 + (2 * 16 * 20 - 16**2) + (2 * 16 * 100 - 16**2)


LLAMAS = {
    "one key a query": {},
    "grouped queries": {"num_key_value_heads": 2},
    "tied embeddings": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "stretched rotary": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "an odd vocabulary": {"vocab_size": 101, "head_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS.keys())
def test_logits_equal_those_of_transformers_llama(options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
        "vocab_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
    }  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**base | options)).eval()
    c = llama.config
    rope = options.get("rope_parameters")
    config = ModelConfig(
        hidden=64, layers=3, heads=4, kv_heads=c.num_key_value_heads, head_dim=c.head_dim, ffn=96,
        vocab_size=c.vocab_size, norm_eps=1e-5, tied_embeddings=c.tie_word_embeddings,
        rope_theta=rope["rope_theta"] if rope else 10000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64) if rope else None,
    )  # fmt: skip
    model = Decoder(config)
    model.load_state_dict(from_hf(llama.state_dict(), config))
    tokens = torch.randint(0, c.vocab_size, (2, 300))
    with torch.no_grad():
        theirs = llama(input_ids=tokens).logits.flatten(0, 1)
        cu = torch.tensor([0, 300, 600], dtype=torch.int32)
        ours = model.logits(tokens.flatten(), positions_of([300, 300]), cu, 300, documents=False)
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.05, "the logits are not all alike"


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"qk_norm": True}, {"bias": True}, {"tied_embeddings": True}, {"window": 20}]
)
def test_each_option_takes_part_and_gets_gradients(change):
    def run(config):
        model = build(config, 1, CPU, torch.float64)
        tokens = torch.arange(64) % 90
        cu = torch.tensor([0, 64], dtype=torch.int32)
        sums = model(tokens, (tokens + 1) % 90, torch.arange(64), cu, 64, documents=False, scale=1 / 64)
        sums.objective.backward()
        return sums.objective.item(), model

    loss, model = run(replace(TINY, **change))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    plain, _ = run(TINY)
    if "bias" not in change:  # biases begin at zero
        assert loss != plain
