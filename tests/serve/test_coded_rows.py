"""Products that take rows which a norm or a gate has rounded to 8 bits: the numbers that the rows themselves give."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here; scripts/gpu_check proves them", allow_module_level=True)

from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import PRESETS
from quantkit.serve.models.coded_rows import CodedRows, norm, silu_mul_coded
from quantkit.serve.models.linear_reader import StoredLinear
from quantkit.serve.models.projection import Projection
from quantkit_kernels import quantize_per_token, rms_norm, silu_mul
from quantkit_kernels.interpreter import interpret_triton

DTYPE = torch.bfloat16


def stored(name: str, rows: int, *, has_bias: bool = False, input_scale: Tensor | None = None) -> StoredLinear:
    generator = torch.Generator().manual_seed(rows)
    weight, scheme = torch.randn(rows, 64, generator=generator), PRESETS["W8A8"]
    scale = choose_qparams(weight, scheme, DTYPE)[0]
    bias = torch.linspace(-30, 30, rows).to(DTYPE) if has_bias else None
    return StoredLinear(name, QuantizedWeight(quantize(weight, scale, scheme), scale, scheme), bias, input_scale)


def rows(columns: int = 64) -> Tensor:
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(0)).to(DTYPE)


@pytest.mark.parametrize("has_bias", [False, True])
def test_codes_give_the_product_of_their_rows(has_bias: bool) -> None:
    x = rows()
    with interpret_triton():
        projection = Projection([stored("q", 32, has_bias=has_bias), stored("k", 16)], DTYPE)
        assert projection.takes_codes
        wanted = projection(x)
        assert torch.equal(projection(CodedRows(*quantize_per_token(x))), wanted)
    assert wanted.shape == (5, 48)


def test_who_takes_no_codes() -> None:
    """Static inputs have no scale a row, other weights want the rows, and a CPU has no kernel for it."""
    with interpret_triton():
        assert not Projection([stored("q", 32, input_scale=torch.ones(1))], DTYPE).takes_codes
        dense = StoredLinear("k", torch.zeros(16, 64, dtype=DTYPE), None)
        assert not Projection([stored("q", 32), dense], DTYPE).takes_codes
    assert not Projection([stored("q", 32)], DTYPE).takes_codes


@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_gives_the_codes_of_its_rows(has_residual: bool) -> None:
    x, weight = rows(), torch.linspace(0.5, 2, 64)
    residual = rows().flip(0) if has_residual else None
    with interpret_triton():
        plain, total = norm(x, weight, 1e-5, residual, coded=False)
        coded, coded_total = norm(x, weight, 1e-5, residual, coded=True)
        assert isinstance(plain, Tensor)
        assert isinstance(coded, CodedRows)
        codes, scale = quantize_per_token(plain)
    assert torch.equal(total, x if residual is None else x + residual)
    assert torch.equal(coded_total, total)
    assert int((coded.codes.int() - codes.int()).abs().max()) <= 1  # the norm may be the next number of 16 bits
    torch.testing.assert_close(coded.scale, scale, rtol=2**-7, atol=0)


def test_a_norm_without_codes_is_the_kernels() -> None:
    x, weight = rows(), torch.linspace(0.5, 2, 64)
    found, _ = norm(x, weight, 1e-5, None, coded=False)
    assert isinstance(found, Tensor)
    assert torch.equal(found, rms_norm(x, weight, 1e-5))


def test_a_gate_gives_the_codes_of_its_rows() -> None:
    x = rows(128)
    with interpret_triton():
        coded, (codes, scale) = silu_mul_coded(x), quantize_per_token(silu_mul(x))
    assert int((coded.codes.int() - codes.int()).abs().max()) <= 1
    torch.testing.assert_close(coded.scale, scale, rtol=2**-7, atol=0)
