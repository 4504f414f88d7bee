"""FP8 values and scales, bit for bit those of a reference that decodes every code by the formats' definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.fp8 import formats
from tests.parallel import fp8_reference as reference

NAMES: list[formats.FormatName] = ["e4m3", "e5m2"]
DTYPES = [torch.float32, torch.bfloat16]
BLOCKS = [(1, 128), (128, 128)]
SHAPES = [(1, 1), (70, 300), (64, 128), (129, 33), (0, 300), (3, 0)]
MAGNITUDES = [1e-38, 1e-3, 1.0, 1e20, 1e38]
MARGINS = [-1, 0, 1, 4]
FLOAT_MAX = torch.finfo(torch.float32).max
SPECIAL = [0.0, 1e-45, 2.0**-127, 5.9e-39, 1.17e-38, 2.0**-126, 1e-37, 1e-36, 0.875, 1.0, 1.75, FLOAT_MAX]
SPECIAL += [np.inf, np.nan]

floats = st.lists(st.floats(width=32), min_size=1, max_size=20).map(lambda drawn: np.array(drawn, np.float32))


def same_codes(values, expected, name):
    """The same codes; NaN's may differ."""
    assert values.dtype == torch.bfloat16
    codes_of = values.to(formats.FORMATS[name].dtype)
    assert torch.equal(codes_of.to(torch.bfloat16).nan_to_num(1e4), values.nan_to_num(1e4)), "no FP8 values"
    hidden = np.isnan(reference.FORMATS[name])
    ours, theirs = (np.where(hidden[codes], 0x7F, codes) for codes in (codes_of.view(torch.uint8).numpy(), expected))
    np.testing.assert_array_equal(ours, theirs)


def same_bits(scale, expected):
    assert scale.dtype == torch.float32
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(scale.view(torch.int32).numpy(), expected.view(np.int32))


def around(values):
    """Values float64, those next to them in fp32, and the negatives of all."""
    x = np.asarray(values, np.float32)
    with np.errstate(over="ignore"):
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return np.concatenate([x, -x])


def every_kind():
    """fp32 [n]: all codes, ties, ends, fp32 denormals, infinities, NaN, and many magnitudes."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(20_000) * 10.0 ** rng.uniform(-44, 38, 20_000)
    exact = [np.float32(form) for form in reference.FORMATS.values()]
    ties = [reference.ties(form) for form in reference.FORMATS.values()]
    edges = np.concatenate([*ties, np.array([*SPECIAL, 448, 464, 480, 61440, 65536])])
    return np.concatenate([*exact, around(edges), np.float32(drawn.clip(-FLOAT_MAX, FLOAT_MAX))])


def matrices(shape):
    """fp32 matrices: one of each magnitude, one of all, one of zeros, and one with a special value in most blocks."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(shape)
    yield from (np.float32((drawn * size).clip(-FLOAT_MAX, FLOAT_MAX)) for size in MAGNITUDES)
    rows = 10.0 ** rng.uniform(-46, 38, (shape[0], 1))
    yield np.float32((drawn * rows * 10.0 ** rng.uniform(-5, 0, (1, shape[1]))).clip(-FLOAT_MAX, FLOAT_MAX))
    yield np.float32(drawn * 0)
    yield np.where(rng.random(shape) < 0.02, np.float32(rng.choice([*SPECIAL, -np.inf], shape)), np.float32(0))


def test_the_references_tables_are_those_of_the_formats():
    e4m3, e5m2 = (reference.FORMATS[name] for name in NAMES)
    assert [reference.largest(form) for form in (e4m3, e5m2)] == [448, 57344]
    assert [form[1] for form in (e4m3, e5m2)] == [2**-9, 2**-16]
    assert [np.isnan(form).sum() for form in (e4m3, e5m2)] == [2, 6]
    assert e4m3[0x38] == e5m2[0x3C] == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_code_comes_back_as_itself(name):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    form, value = formats.FORMATS[name], reference.FORMATS[name].reshape(16, 16)
    whole = formats.Quantized(codes.view(form.dtype), torch.tensor(1.0))
    np.testing.assert_array_equal(whole.dequantized(torch.float64).numpy(), value)
    back = formats.quantize_tensor(whole.dequantized(torch.float32), torch.tensor(1.0), form)
    finite = ~np.isinf(value)
    same_codes(back.values.flatten()[finite.flatten()], codes.numpy()[finite], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_the_nearest_ties_to_even_within_the_largest(name, dtype):
    form, x = formats.FORMATS[name], torch.from_numpy(every_kind()).to(dtype)
    for scale in map(np.float32, [1, 0.3, 2.0**-127, 2.0**127, FLOAT_MAX, 3e-36, 1e10, 2.0**-9]):
        expected = reference.to_fp8(x.float().numpy(), scale, reference.FORMATS[name])
        q = formats.quantize_tensor(x[None], torch.tensor(scale), form)
        same_codes(q.values[0], expected, name)
        with np.errstate(over="ignore"):
            same_bits(q.inverse, np.array(1 / scale))


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_rounded_to_fp32_before_it_is_rounded_to_fp8(name):
    table = reference.FORMATS[name]
    tie, scale = np.meshgrid(reference.ties(table), np.float32(np.random.default_rng(2).uniform(0.1, 10, 50)))
    x = around((tie / scale).flatten())
    scale = np.tile(scale.flatten(), 6)
    values = formats.to_fp8(torch.from_numpy(x), torch.from_numpy(scale), formats.FORMATS[name])
    same_codes(values, reference.to_fp8(x, scale, table), name)
    assert (reference.nearest(x * scale.astype(np.float64), table) != reference.to_fp8(x, scale, table)).any()


@given(x=floats, scale=st.floats(width=32).map(abs))
def test_any_value_by_any_scale(x, scale):
    for name in NAMES:
        values = formats.to_fp8(torch.from_numpy(x), torch.tensor(scale), formats.FORMATS[name])
        same_codes(values, reference.to_fp8(x, np.float32(scale), reference.FORMATS[name]), name)


def scales_agree(amax):
    for name in NAMES:
        form, table, ours = formats.FORMATS[name], reference.FORMATS[name], torch.from_numpy(amax)
        for power_of_two in (False, True):
            scale = formats.current_scale(ours, form, power_of_two)
            same_bits(scale, reference.current_scale(amax, table, power_of_two))
        old = np.linspace(2, 3, len(amax), dtype=np.float32)
        for margin in MARGINS:
            scale = formats.delayed_scale(ours, torch.from_numpy(old), form, margin)
            same_bits(scale, reference.delayed_scale(amax, old, table, margin))
        exponent = formats.mx_exponent(ours, form)
        assert exponent.dtype == torch.int32
        np.testing.assert_array_equal(exponent.numpy(), reference.mx_exponent(amax, table))


def test_scales_of_every_kind_of_maximum():
    scales_agree(np.abs(every_kind()))
    powers = np.ldexp(1.0, np.arange(-140, 128))  # of two, and those times the formats' largest and 1.75
    scales_agree(np.abs(around(np.concatenate([powers, powers[:-9] * 448, powers[:-1] * 1.75]))))


@given(amax=floats.map(np.abs))
def test_scales_of_any_maximum(amax):
    scales_agree(amax)


@given(amax=floats.map(np.abs))
def test_a_scale_brings_its_maximum_to_the_largest_and_a_power_of_two_no_further(amax):
    for form in formats.FORMATS.values():
        usual = amax[np.isfinite(amax) & (amax > 2.0**-100)].astype(np.float64)
        ours = torch.from_numpy(usual.astype(np.float32))
        scaled = usual * formats.current_scale(ours, form).double().numpy()
        np.testing.assert_allclose(scaled, form.largest, rtol=1e-7)
        scaled = usual * formats.current_scale(ours, form, power_of_two=True).double().numpy()
        assert ((form.largest / 2 < scaled * (1 + 1e-7)) & (scaled <= form.largest * (1 + 1e-7))).all()
        scaled = usual * 2.0 ** (127 - formats.mx_exponent(ours, form).double().numpy())
        assert ((form.largest / 2 < scaled * (1 + 2e-7)) & (scaled <= form.largest * (1 + 2e-7))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [*BLOCKS, (32, 1), (1, 32)])
def test_blocks_have_their_own_powers_of_two_and_are_exact_in_bf16(block, shape, dtype):
    mx = 32 in block
    for matrix in matrices(shape):
        x = torch.from_numpy(matrix).to(dtype)
        for name in NAMES if mx else NAMES[:1]:
            form, table = formats.FORMATS[name], reference.FORMATS[name]
            scales = reference.mx_scales if mx else reference.block_scales
            codes, inverse = reference.quantize_blocks(x.float().numpy(), block, table, scales)
            q = formats.quantize_mx(x, block.index(32), form) if mx else formats.quantize_blocks(x, block, form)
            assert q.block == block
            same_codes(q.values, codes, name)
            same_bits(q.inverse, inverse)
            exact = table[codes] * reference.spread(inverse, block, shape).astype(np.float64)
            size, bf16 = np.abs(exact), torch.finfo(torch.bfloat16)
            within = (size == 0) | (size >= bf16.tiny) & (size <= bf16.max)
            np.testing.assert_array_equal(q.dequantized(torch.bfloat16).double().numpy()[within], exact[within])
