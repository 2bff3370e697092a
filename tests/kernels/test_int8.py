"""w8a16_gemm and w8a8_gemm: the references against their formulas, the CPU bodies against the references."""

import pytest
import torch
from torch import Tensor

from quantkit_kernels import cpu_int8, prepack_w8a8, prepack_w8a16, reference, w8a8_gemm, w8a16_gemm
from quantkit_kernels.cpu_int8 import MAX_INT8_ROWS, CpuW8A8, CpuW8A16
from quantkit_kernels.dispatch import ReferenceWeight

# Relative to the largest output. float32: sums in another order. bfloat16: one or two roundings of the output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
SHAPES = [(3, 32), (48, 64), (80, 1536)]  # any number of rows; more columns than float32 sums are exact for


def make_weight(out_features: int, in_features: int, groups: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    codes = torch.randint(-128, 128, (out_features, in_features), generator=generator).to(torch.int8)
    return codes, torch.randn(out_features, groups, generator=generator).to(torch.bfloat16)


def make_input(rows: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    error = (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= TOLERANCE[actual.dtype]


def test_the_references_are_their_formulas() -> None:
    codes, scale = make_weight(3, 8)
    zero_point = torch.tensor([[5], [-7], [0]], dtype=torch.int8)
    x = torch.tensor([[127.0, -254.0, 1.0, 0.0, 3.0, 63.5, -1.0, 2.0]])
    wanted = [sum(float(x[0, k]) * (int(codes[n, k]) - int(zero_point[n])) for k in range(8)) for n in range(3)]
    torch.testing.assert_close(
        reference.w8a16_gemm(x, codes, scale, -1, zero_point)[0], torch.tensor(wanted) * scale.float().flatten()
    )
    # 8-bit inputs: the largest, 254, is code -127, so that a step is 2; ties go to the even code
    inputs = torch.tensor([64, -127, 0, 0, 2, 32, 0, 1])
    assert torch.equal(reference.quantize_input(x)[0][0], inputs.float())
    wanted = [2 * sum(int(inputs[k]) * int(codes[n, k]) for k in range(8)) for n in range(3)]
    torch.testing.assert_close(reference.w8a8_gemm(x, codes, scale)[0], torch.tensor(wanted) * scale.float().flatten())
    static = reference.quantize_input(x, torch.tensor([1.0]))[0][0]
    assert static.tolist() == [127, -128, 1, 0, 3, 64, -1, 2]
    assert not reference.w8a8_gemm(torch.zeros(2, 8), codes, scale).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, MAX_INT8_ROWS, MAX_INT8_ROWS + 1, 200])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("has_zero_point", [False, True])
@pytest.mark.parametrize("group_size", [32, -1])
def test_w8a16(
    out_features: int, in_features: int, rows: int, group_size: int, has_zero_point: bool, dtype: torch.dtype
) -> None:
    codes, scale = make_weight(out_features, in_features, 1 if group_size == -1 else in_features // group_size)
    zero_point = torch.randint(-128, 128, scale.shape).to(torch.int8) if has_zero_point else None
    x = make_input(rows, in_features, dtype)
    weight, reason = prepack_w8a16(codes, scale, group_size, dtype, zero_point)
    assert isinstance(weight, CpuW8A16)
    assert f"{dtype} on a CPU with" in reason
    assert_near(weight(x), reference.w8a16_gemm(x, codes, scale, group_size, zero_point))
    assert torch.equal(w8a16_gemm(x, codes, scale, group_size, zero_point), weight(x))
    assert weight.nbytes < 2.2 * codes.nbytes + 1000


@pytest.mark.parametrize("has_int8_matmul", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, MAX_INT8_ROWS + 1])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("static", [False, True])
def test_w8a8(
    out_features: int,
    in_features: int,
    rows: int,
    static: bool,
    dtype: torch.dtype,
    has_int8_matmul: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both bodies run on every CPU; which is the faster one is another matter. Compiled: test_native_int8.py."""
    from quantkit_kernels import dispatch

    for module in (cpu_int8, dispatch):
        monkeypatch.setattr(module, "has_int8_matmul", lambda: has_int8_matmul)
    monkeypatch.setattr(dispatch, "native_w8a8_blocker", lambda codes: "no compiler")
    codes, scale = make_weight(out_features, in_features)
    input_scale = torch.tensor([0.02]) if static else None
    x = make_input(rows, in_features, dtype)
    weight, reason = prepack_w8a8(codes, scale, dtype, input_scale)
    assert isinstance(weight, CpuW8A8)
    fast, why_not = ("with", "") if has_int8_matmul else ("without", "; no compiler")
    assert reason == f"{dtype} on a CPU {fast} 8-bit matrix products (VNNI){why_not}"
    assert weight.body == ("cpu int8 whole numbers" if has_int8_matmul else "cpu int8 as float16")
    assert_near(weight(x), reference.w8a8_gemm(x, codes, scale, input_scale))
    assert torch.equal(w8a8_gemm(x, codes, scale, input_scale), weight(x))


def test_what_the_bodies_do_not_take_goes_to_the_reference_and_says_so() -> None:
    codes, scale = make_weight(16, 32)
    x = make_input(3, 32, torch.float16)
    for weight, reason in (prepack_w8a16(codes, scale, -1, torch.float16), prepack_w8a8(codes, scale, torch.float16)):
        assert isinstance(weight, ReferenceWeight)
        assert reason == "activations are torch.float16, not torch.bfloat16 or torch.float32"
        assert weight(x).dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codes": torch.zeros(4, 8)}, r"codes are torch.float32 \[4, 8\], allowed is torch.int8"),
        ({"scale": torch.ones(4)}, r"scale is torch.float32 \[4\], allowed is floating \[4, 1\]"),
        ({"x": torch.ones(2, 7)}, r"x is torch.float32 \[2, 7\], allowed is .*\[\.\.\., 8\]"),
        ({"input_scale": torch.ones(2)}, r"input_scale is \[2\], allowed is \[1\] or None"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Tensor], message: str) -> None:
    good = {"x": torch.ones(2, 8), "codes": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}
    with pytest.raises(ValueError, match=message):
        reference.w8a8_gemm(**(good | arguments))  # type: ignore[arg-type]
