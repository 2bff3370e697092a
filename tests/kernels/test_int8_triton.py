"""The Triton bodies of w8a16_gemm and w8a8_gemm in the interpreter, against the references."""

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels import dispatch, prepack_w8a8, prepack_w8a16, reference
from quantkit_kernels.crossover_table import crossover
from quantkit_kernels.tiling import generation
from quantkit_kernels.triton_w8a8 import TritonW8A8, multiply_codes, w8a8_gemm
from quantkit_kernels.triton_w8a16 import TritonW8A16, w8a16_gemm

AssertNear = Callable[[Tensor, Tensor], None]
WEIGHTS = [(48, 64, 32), (33, 50, -1), (70, 192, 64), (17, 256, 128), (20, 1050, -1), (24, 1024, 512)]  # N, K, group


def make_weight(out_features: int, in_features: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    codes = torch.randint(-128, 128, (out_features, in_features), generator=generator).to(torch.int8)
    groups = 1 if group_size == -1 else in_features // group_size
    scale = torch.randn(out_features, groups, generator=generator).to(torch.bfloat16)
    return codes, scale, torch.randint(-128, 128, scale.shape, generator=generator).to(torch.int8)


def make_input(rows: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows with NaN behind them; one is all zeros."""
    values = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    if rows > 2:
        values[1] = 0
    buffer = torch.full((rows + 1, in_features + 160), float("nan"), dtype=dtype)
    buffer[:rows, :in_features] = values
    return buffer[:rows, :in_features]


@pytest.mark.parametrize("rows", [1, 3, 16, 63])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_w8a16(
    out_features: int, in_features: int, group_size: int, rows: int, has_zero: bool, assert_near: AssertNear,
    unwritten_is_nan: None,
) -> None:  # fmt: skip
    dtype = torch.bfloat16 if has_zero else torch.float16
    codes, scale, zero_point = make_weight(out_features, in_features, group_size)
    zeros = zero_point if has_zero else None
    x = make_input(rows, in_features, dtype)
    wanted = reference.w8a16_gemm(x, codes, scale, group_size, zeros)
    assert_near(w8a16_gemm(x, codes, scale, group_size, zeros), wanted)


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_many_rows_are_multiplied_by_the_dequantized_weight(
    out_features: int, in_features: int, group_size: int, has_zero: bool, unwritten_is_nan: None
) -> None:
    codes, scale, zero_point = make_weight(out_features, in_features, group_size)
    zeros = zero_point if has_zero else None
    weight = TritonW8A16(codes, scale, group_size, torch.bfloat16, zeros)
    dense = reference.dequantize(codes, scale, zeros).to(torch.bfloat16)
    assert torch.equal(weight.dequantize(), dense)
    weight.crossover = dataclasses.replace(weight.crossover, w8a16_packed_rows=4)
    x = make_input(5, in_features, torch.bfloat16)
    assert torch.equal(weight(x), torch.nn.functional.linear(x, dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 63])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 64), (33, 50), (20, 1050)])
@pytest.mark.parametrize(("static", "has_bias"), [(False, True), (True, False)])
def test_w8a8(
    out_features: int, in_features: int, rows: int, static: bool, has_bias: bool, dtype: torch.dtype,
    assert_near: AssertNear, unwritten_is_nan: None,
) -> None:  # fmt: skip
    codes, scale, _ = make_weight(out_features, in_features, -1)
    input_scale = torch.tensor([0.02]) if static else None
    bias = torch.linspace(-9, 9, out_features) * out_features if has_bias else None
    x = make_input(rows, in_features, dtype)
    wanted = reference.w8a8_gemm(x, codes, scale, input_scale, bias)
    assert_near(w8a8_gemm(x, codes, scale, input_scale, bias), wanted)


def test_the_sums_of_whole_numbers_are_exact() -> None:
    """The largest codes in 2,000 columns: beyond what a float32 sum holds exactly."""
    codes = torch.full((16, 2001), -128, dtype=torch.int8)
    x = torch.full((2, 2001), 127, dtype=torch.int8)
    x[1, 0] = 126
    product = multiply_codes(x, torch.ones(1), codes, torch.ones(16, 1), None, torch.float32)
    assert product[:, 0].tolist() == [-127 * 128 * 2001, -127 * 128 * 2001 + 128]


def test_no_row_and_leading_dimensions(assert_near: AssertNear) -> None:
    codes, scale, _ = make_weight(48, 64, -1)
    x = torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(0)).permute(1, 2, 0)
    weight = TritonW8A8(codes, scale, torch.float32)
    assert_near(weight(x), reference.w8a8_gemm(x, codes, scale))
    assert weight(x[:0]).shape == (0, 3, 48)
    sixteen_bits = TritonW8A16(codes, scale, -1, torch.float16)
    assert_near(sixteen_bits(x.half()), reference.w8a16_gemm(x.half(), codes, scale, -1))
    assert sixteen_bits(x[:0].half()).shape == (0, 3, 48)


def test_the_references_add_the_bias_before_they_round() -> None:
    codes, scale, _ = make_weight(3, 8, -1)
    x = make_input(2, 8, torch.float32)
    bias = torch.tensor([1.0, -2.0, 0.5])
    torch.testing.assert_close(
        reference.w8a8_gemm(x, codes, scale, None, bias), reference.w8a8_gemm(x, codes, scale) + bias
    )
    weight, _ = prepack_w8a8(codes, scale, torch.float32, None, bias)
    torch.testing.assert_close(weight(x), reference.w8a8_gemm(x, codes, scale, None, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_codes": torch.zeros(2, 7, dtype=torch.int8)}, r"x_codes are torch.int8 \[2, 7\].* allowed is contiguous"),
        ({"x_codes": torch.zeros(8, 2, dtype=torch.int8).T}, r"x_codes are .* strides \(1, 2\), allowed is contiguous"),
        ({"x_scale": torch.ones(3)}, r"x_scale is torch.float32 \[3\], allowed is torch.float32 \[2, 1\], \[1\]"),
        ({"codes": torch.zeros(8, 4, dtype=torch.int8).T}, r"codes have the strides \(1, 4\), allowed is contiguous"),
        ({"bias": torch.ones(3)}, r"bias is torch.float32 \[3\], allowed is floating \[4\] or None"),
        ({"x_scale": torch.ones(2, 1, device="meta")}, r"x_codes are on cpu and x_scale on meta, allowed is cpu"),
        (
            {
                "x_codes": torch.zeros(1, 2**17, dtype=torch.int8),
                "codes": torch.zeros(4, 2**17, dtype=torch.int8),
                "x_scale": torch.ones(1),
            },
            r"codes have 131072 columns, allowed is up to 131071",
        ),
    ],
)
def test_codes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    good: dict[str, Tensor | None] = {
        "x_codes": torch.zeros(2, 8, dtype=torch.int8), "x_scale": torch.ones(2, 1),
        "codes": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1), "bias": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        multiply_codes(**(good | change), dtype=torch.float32)  # type: ignore[arg-type]


def test_a_gpu_gets_the_triton_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_blocker", lambda device: None)
    monkeypatch.setattr(dispatch, "_crossover_of", lambda device: crossover("NVIDIA H200"))
    codes, scale, _ = make_weight(48, 64, -1)
    weight, reason = prepack_w8a16(codes, scale, -1, torch.bfloat16)
    assert isinstance(weight, TritonW8A16)
    assert reason.startswith("up to 512 rows; dequantized for more (estimate from the roofline")
    assert weight.nbytes == codes.nbytes + scale.nbytes
    weight, reason = prepack_w8a8(codes, scale, torch.bfloat16)
    assert isinstance(weight, TritonW8A8)
    assert reason == "tensors are on cpu"
    assert weight.nbytes == codes.nbytes + scale.nbytes


def test_signatures_are_those_of_the_reference() -> None:
    assert inspect.signature(w8a16_gemm) == inspect.signature(reference.w8a16_gemm)
    assert inspect.signature(w8a8_gemm) == inspect.signature(reference.w8a8_gemm)


@pytest.mark.parametrize(
    ("capability", "tiles"), [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 3), 90), ((12, 0), 80)], ids=str
)
def test_tiles_are_those_of_a_kind_of_gpu(
    capability: tuple[int, int], tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute capability 12.0 has a newer number than Hopper and less shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert generation.__wrapped__(torch.device("cuda", 0)) == tiles
    assert generation(torch.device("cpu")) == 90


def test_more_columns_than_a_program_holds_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is refused when it is prepared, not when the first token comes."""
    monkeypatch.setattr(dispatch, "triton_blocker", lambda device: None)
    codes = torch.zeros(2, 32768 + 8, dtype=torch.int8)
    weight, reason = prepack_w8a8(codes, torch.ones(2, 1), torch.bfloat16)
    assert (weight.body, reason) == ("reference", "K=32776 is more than 32768")
    assert torch.equal(weight(torch.ones(1, 32776)), torch.zeros(1, 2))
    weight, _ = prepack_w8a8(codes[:, :32768], torch.ones(2, 1), torch.bfloat16)
    assert isinstance(weight, TritonW8A8)
