"""Initial weights are a function of (seed, name, index)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.build import build
from model.config import ModelConfig
from model.init import fill_rectangle, hashed_uniform, stream_key
from model.transformer import initial_std


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_rectangle_holds_what_the_whole_tensor_holds_there(data):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, full - begin)) for full, begin in zip(shape, start, strict=True)]
    whole, part = torch.empty(shape), torch.empty(size)
    fill_rectangle(whole, 7, 0.5, shape)
    fill_rectangle(part, 7, 0.5, shape, start)
    inside = whole[tuple(slice(b, b + n) for b, n in zip(start, size, strict=True))]
    assert torch.equal(part, inside)


def test_large_tensors_are_filled_in_pieces_without_a_seam():
    whole = torch.empty(3000, 700)
    fill_rectangle(whole, 3, 1.0, whole.shape)
    row = torch.empty(1, 700)
    fill_rectangle(row, 3, 1.0, whole.shape, (2999, 0))
    assert torch.equal(whole[-1:], row)


def test_values_follow_the_cut_normal_distribution():
    x = torch.empty(1000, 1000, dtype=torch.float64)
    fill_rectangle(x, stream_key(1, "a"), 1.0, x.shape)
    assert abs(x.mean()) < 3e-3
    assert x.std() == pytest.approx(0.98658, abs=3e-3)  # of a normal cut at three deviations
    assert x.abs().max() <= 3.0
    neighbours = (x[:, 1:] * x[:, :-1]).mean()
    assert abs(neighbours) < 3e-3


def test_seed_and_name_change_every_value():
    index = torch.arange(1000)
    one = hashed_uniform(stream_key(1, "a"), index)
    for other in (stream_key(2, "a"), stream_key(1, "b")):
        assert (hashed_uniform(other, index) != one).all()


def test_the_hash_is_splitmix64():
    """First outputs of the published generator for seed 1234567 (Vigna's reference code)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    values = hashed_uniform(1234567, torch.arange(3))
    assert [int(v * 2**52) for v in values] == [e >> 12 for e in expected]


def test_the_vocabulary_padding_does_not_change_the_model():
    def weights(multiple):
        config = ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, vocab_size=100, vocab_multiple=multiple)
        return build(config, 1, torch.device("cpu"), torch.float32)

    a, b = weights(1), weights(128)
    assert b.embedding.weight.shape[0] == 128
    assert torch.equal(a.embedding.weight, b.embedding.weight[:100])
    assert torch.equal(a.blocks[0].mlp.up.weight, b.blocks[0].mlp.up.weight)


def test_output_linears_are_damped_by_depth():
    config = ModelConfig(layers=8)
    assert initial_std("layers.0.mlp.down.weight", config) == pytest.approx(0.02 / 4)
    assert initial_std("layers.0.mlp.up.weight", config) == 0.02
