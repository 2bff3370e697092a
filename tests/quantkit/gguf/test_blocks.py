"""The block types against the gguf package, whose decoders and plain quantizers share no code with ours."""

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import QuantizationError
from quantkit.formats.gguf.block_types import BLOCK_TYPES, bits_per_weight
from quantkit.formats.gguf.blocks import PLAINLY_ROUNDED, encode_rows, fit_grid
from quantkit.formats.gguf.grid import dequantize, nearest_levels

COLUMNS = 512


@pytest.fixture(scope="module")
def weight():
    """Rows of every kind: ordinary, zero, a zero block, constant, one outlier, large, tiny."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, COLUMNS, generator=generator) * 0.05
    rows[0] = 0.0
    rows[1, :256] = 0.0
    rows[2], rows[3] = 0.3, -0.2
    rows[4, 7] = 30.0
    rows[5] *= 1e4
    rows[6] *= 1e-6
    rows[7] = rows[7].abs()
    return rows


@pytest.fixture(scope="module")
def importance():
    values = torch.rand(COLUMNS, generator=torch.Generator().manual_seed(1)) ** 4
    values[:40] = 0.0
    return values


def decode(encoded, name):
    return torch.from_numpy(gguf.quants.dequantize(encoded.numpy(), gguf.GGMLQuantizationType[name]))


def weighted_error(decoded, weight, measure):
    return float(((decoded - weight).square() * measure).sum() / (weight.square() * measure).sum())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_gguf_decodes_what_we_computed(name, weight, importance):
    block_type = BLOCK_TYPES[name]
    for columns in (None, importance):
        grid = fit_grid(weight, name, columns)
        ours = dequantize(nearest_levels(weight, grid, block_type), grid, block_type)
        assert torch.isfinite(ours).all()
        if columns is not None or name not in PLAINLY_ROUNDED:
            assert torch.equal(decode(encode_rows(weight, name, columns), name), ours)


@pytest.mark.parametrize("name", PLAINLY_ROUNDED)
def test_without_importance_the_old_types_are_the_gguf_packages(name, weight):
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(encode_rows(weight, name).numpy(), expected)


@pytest.mark.parametrize("name", PLAINLY_ROUNDED)
def test_importance_lowers_the_error_that_it_weighs(name, importance):
    rows = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))
    plain = weighted_error(decode(encode_rows(rows, name), name), rows, importance)
    fitted = weighted_error(decode(encode_rows(rows, name, importance), name), rows, importance)
    assert fitted < 0.85 * plain


# Plain rounding to 2^b evenly spaced levels over each group's range is an upper bound that any search must beat.
@pytest.mark.parametrize(("name", "levels", "group"), [("Q2_K", 4, 16), ("Q4_K", 16, 32), ("Q5_K", 32, 32)])
def test_k_types_beat_rounding_over_the_range_with_exact_scales(name, levels, group):
    rows = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(3)) * 0.02
    blocks = rows.unflatten(1, (-1, group))
    low = blocks.amin(-1, keepdim=True)
    step = (blocks.amax(-1, keepdim=True) - low) / (levels - 1)
    plain = (((blocks - low) / step).round() * step + low).flatten(1)
    ones = torch.ones(COLUMNS)
    ours = decode(encode_rows(rows, name, ones), name)
    assert weighted_error(ours, rows, ones) < weighted_error(plain, rows, ones)


def test_more_bits_less_error(importance):
    rows = torch.randn(32, COLUMNS, generator=torch.Generator().manual_seed(4))
    order = ["Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
    errors = [weighted_error(decode(encode_rows(rows, name, importance), name), rows, importance) for name in order]
    assert errors == sorted(errors, reverse=True)
    assert [bits_per_weight(name) for name in order] == [2.625, 3.4375, 4.25, 4.5, 5.5, 6.5625, 8.5]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_importance_of_zero_counts_as_none(name, weight):
    assert torch.equal(encode_rows(weight, name, torch.zeros(COLUMNS)), encode_rows(weight, name, torch.ones(COLUMNS)))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types(name, weight):
    encoded = encode_rows(weight, name)
    expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    assert encoded.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        (torch.full((2, 256), float("nan")), "Q4_K", "holds NaN or infinity"),
        (torch.full((2, 256), float("inf")), "F16", "holds NaN or infinity"),
        (torch.full((2, 256), 1e6), "F16", r"largest weight, 1e\+06, is too large for F16"),
        (torch.linspace(-1e9, 1e9, 512).reshape(2, 256), "Q4_K", r"largest weight, 1e\+09, is too large for Q4_K"),
        (torch.zeros(2, 96), "Q6_K", "Q6_K needs rows of a multiple of 256, not 96"),
    ],
)
def test_what_cannot_be_stored(rows, name, message):
    with pytest.raises(QuantizationError, match=message):
        encode_rows(rows, name)
