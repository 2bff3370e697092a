"""quantize_per_token, alone and fused: the references against their parts, the Triton bodies against the references."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quantkit_kernels
from quantkit_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (3, 1), (16, 70), (63, 129)]


def bodies(operation: str) -> list[Callable[..., tuple[Tensor, ...]]]:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels import triton_quantize

    return [getattr(triton_quantize, operation), getattr(quantkit_kernels, operation)]


def make_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes with NaN behind them; one is all zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    buffer = torch.full((rows, columns + 37), float("nan"), dtype=dtype)
    buffer[:, :columns] = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 3, rows).unsqueeze(1)
    if rows > 2:
        buffer[1, :columns] = 0
    return buffer[:, :columns]


def assert_codes(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], most_moved: float) -> None:
    """Codes are whole numbers: those that differ, differ by one, and are few; scales agree to the rounding of x."""
    codes, scale = found[0], found[1]
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    moved = (codes.int() - wanted[0].int()).abs()
    assert int(moved.max()) <= (1 if most_moved else 0)
    assert (moved > 0).float().mean() <= most_moved
    torch.testing.assert_close(scale, wanted[1], rtol=2**-7 if most_moved else 0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("static", [False, True])
def test_rows_become_the_codes_of_the_reference(
    rows: int, columns: int, dtype: torch.dtype, static: bool, unwritten_is_nan: None
) -> None:
    x = make_rows(rows, columns, dtype)
    input_scale = torch.tensor([0.25]) if static else None
    wanted = reference.quantize_per_token(x, input_scale)
    for body in bodies("quantize_per_token"):
        assert_codes(body(x, input_scale), wanted, most_moved=0)


def test_the_reference_is_its_formula() -> None:
    x = torch.tensor([[127.0, -254.0, 1.0, 3.0, 63.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scale = reference.quantize_per_token(x)
    assert codes.tolist() == [[64, -127, 0, 2, 32], [0, 0, 0, 0, 0]]  # ties go to the even code
    assert scale.tolist() == [[2.0], [1.0]]
    assert reference.quantize_per_token(x, torch.tensor([1.0]))[0][0].tolist() == [127, -128, 1, 3, 64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("has_residual", "offset"), [(False, 0.0), (True, 1.0)])
def test_norm_and_quantize_in_one(
    rows: int, columns: int, dtype: torch.dtype, has_residual: bool, offset: float, unwritten_is_nan: None
) -> None:
    x = make_rows(rows, columns, dtype)
    residual = make_rows(rows, columns, dtype).flip(0) if has_residual else None
    weight = torch.linspace(-2, 2, columns)
    wanted = reference.rms_norm_quantize(x, weight, 1e-5, residual=residual, offset=offset)
    alone = reference.rms_norm(x, weight, 1e-5, residual=residual, offset=offset)
    parts = reference.quantize_per_token(alone[0] if isinstance(alone, tuple) else alone)
    assert torch.equal(parts[0], wanted[0])
    for body in bodies("rms_norm_quantize"):
        found = body(x, weight, 1e-5, residual=residual, offset=offset)
        assert_codes(found, wanted, most_moved=0.02)
        if has_residual:
            assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_gate_and_quantize_in_one(rows: int, columns: int, dtype: torch.dtype, unwritten_is_nan: None) -> None:
    x = make_rows(rows, 2 * columns, dtype).div_(100)  # numpy warns where an exponential overflows
    wanted = reference.silu_mul_quantize(x)
    for body in bodies("silu_mul_quantize"):
        assert_codes(body(x), wanted, most_moved=0.02)


def test_what_does_not_fit_is_refused() -> None:
    for body in bodies("quantize_per_token"):
        with pytest.raises(ValueError, match=r"x is torch.float64 \[2, 8\], allowed is torch.float32 or"):
            body(torch.zeros(2, 8, dtype=torch.float64))
        with pytest.raises(ValueError, match="x has the stride 2 along its last dimension, allowed is 1"):
            body(torch.zeros(2, 16)[:, ::2])
        with pytest.raises(ValueError, match=r"input_scale is torch.float32 \[2\], allowed is .* \[1\]"):
            body(torch.zeros(2, 8), torch.ones(2))
    with pytest.raises(ValueError, match="x has 32769 columns, allowed is up to 32768"):
        bodies("quantize_per_token")[0](torch.zeros(1, 32769))


@pytest.mark.parametrize("operation", ["quantize_per_token", "rms_norm_quantize", "silu_mul_quantize"])
def test_signatures_are_those_of_the_reference(operation: str) -> None:
    assert inspect.signature(bodies(operation)[0]) == inspect.signature(getattr(reference, operation))
