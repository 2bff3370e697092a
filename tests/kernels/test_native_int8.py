"""The compiled product of 8-bit weights and 8-bit inputs: equal to the reference, to the last bit."""

import pytest
import torch
from torch import Tensor

from quantkit_kernels import cpu_int8, dispatch, native_library, prepack_w8a8, reference
from quantkit_kernels.cpu_int8 import CpuW8A8
from quantkit_kernels.cpu_native_int8 import MAX_COLUMNS, NativeW8A8, native_w8a8_blocker
from quantkit_kernels.dispatch import choose_w8a8_gemm

blocker = native_library.native_blocker()
needs_native = pytest.mark.skipif(blocker is not None, reason=str(blocker))

INF, NAN = float("inf"), float("nan")
SHAPES = [(1, 1), (16, 8), (33, 63), (100, 576), (20, 1537)]  # rows of the weight that fill no panel; odd columns
STATIC = torch.tensor([0.02])  # so that inputs of 2.56 and more are cut off


def make_weight(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out_features + in_features)
    codes = torch.randint(-128, 128, (out_features, in_features), generator=generator).to(torch.int8)
    return codes, torch.randn(out_features, 1, generator=generator)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 40])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("input_scale", [None, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_reference(
    has_bias: bool, input_scale: Tensor | None, out_features: int, in_features: int, rows: int
) -> None:
    codes, scale = make_weight(out_features, in_features)
    bias = random(out_features, seed=1) if has_bias else None
    weight = NativeW8A8(codes, scale, input_scale, bias)
    x = random(rows, in_features, seed=rows)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        typed = x.to(dtype)
        assert_equal(weight(typed), reference.w8a8_gemm(typed, codes, scale, input_scale, bias))
    assert torch.equal(weight(x[-1]), weight(x)[-1])
    assert weight(x.view(1, rows, 1, in_features)).shape == (1, rows, 1, out_features)
    assert weight(x[:0]).shape == (0, out_features)


@needs_native
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_and_biases_of_any_type(scale_type: torch.dtype) -> None:
    codes, scale = make_weight(33, 63)
    typed, bias, input_scale = scale.to(scale_type), random(33).to(scale_type), STATIC.to(scale_type)
    x = random(7, 63)
    assert_equal(
        NativeW8A8(codes, typed, input_scale, bias)(x), reference.w8a8_gemm(x, codes, typed, input_scale, bias)
    )


@needs_native
def test_codes_are_those_of_the_reference_where_they_round() -> None:
    """A weight of one 1 a row shows each code: halves go to the even one, the largest magnitudes to the ends."""
    eye = torch.eye(16, dtype=torch.int8)
    ones = torch.ones(16, 1)
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 127.5, -127.5, -128.5, 300, -300, 0, 64, 9])
    assert_equal(NativeW8A8(eye, ones, torch.ones(1))(halves), reference.quantize_input(halves, torch.ones(1))[0])
    assert NativeW8A8(eye, ones, torch.ones(1))(halves).tolist() == [
        0, 2, 2, 0, -2, -2, 126, -126, 127, -128, -128, 127, -128, 0, 64, 9,
    ]  # fmt: skip
    for largest in (127.0, -127.0, 1e-3, 3e38, 1e-36, 1e-38, 1e-42, 2e-45):  # the last are not normal
        x = torch.cat([random(15) / 3, torch.tensor([1.0])]) * largest
        row_codes, scale = reference.quantize_input(x[None])
        assert_equal(NativeW8A8(eye, ones)(x), (row_codes * scale)[0])


@needs_native
@pytest.mark.parametrize(("input_scale", "x"), [(None, -1.0), (torch.ones(1), -1000.0), (torch.ones(1), 1000.0)])
@pytest.mark.parametrize("code", [-128, 127])
def test_the_largest_sums_are_exact(code: int, input_scale: Tensor | None, x: float) -> None:
    codes = torch.full((3, MAX_COLUMNS), code, dtype=torch.int8)
    rows = torch.full((2, MAX_COLUMNS), x)
    scale = torch.ones(3, 1)
    assert_equal(NativeW8A8(codes, scale, input_scale)(rows), reference.w8a8_gemm(rows, codes, scale, input_scale))


@needs_native
@pytest.mark.parametrize("input_scale", [None, 0.02, 0.0, -0.5, INF, NAN], ids=str)
def test_rows_of_zeros_and_of_what_is_no_number(input_scale: float | None) -> None:
    """A row that holds NaN is NaN, one with infinity too unless a static scale cuts it off; others stay as they are."""
    codes, scale = make_weight(20, 63)
    static = None if input_scale is None else torch.tensor([input_scale])
    x = random(9, 63)
    x[1] = 0
    for row, value in ((2, NAN), (3, INF), (4, -INF), (7, NAN)):
        x[row, 5 * row] = value
    x[7, 62], x[6, 62] = INF, 1e38
    wanted = reference.w8a8_gemm(x, codes, scale, static)
    found = NativeW8A8(codes, scale, static)(x)
    assert_equal(found, wanted)
    if input_scale in (None, 0.02):
        assert_equal(found.isnan().all(1), CpuW8A8(codes, scale, torch.float32, static)(x).isnan().all(1))
        assert not found[1].any()
        assert found[[2, 7]].isnan().all()
        assert found[3:5].isnan().all() == (input_scale is None)


@needs_native
def test_results_do_not_depend_on_rows_nor_threads() -> None:
    codes, scale = make_weight(640, 576)
    weight, x = NativeW8A8(codes, scale), random(400, 576)  # more rows than are multiplied at once
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(weight(x))
    finally:
        torch.set_num_threads(before)
    assert_equal(found[0], reference.w8a8_gemm(x, codes, scale))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for rows in (1, 8, 32):
        assert torch.equal(torch.cat([weight(x[start : start + rows]) for start in range(0, 400, rows)]), found[0])


@needs_native
def test_a_weight_takes_a_byte_a_code() -> None:
    codes, scale = make_weight(64, 576)
    assert NativeW8A8(codes, scale, STATIC, random(64)).nbytes == codes.nbytes + 4 * (64 + 1 + 64)
    assert NativeW8A8(codes.t().contiguous().t(), scale).nbytes == codes.nbytes + 4 * 64


@needs_native
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codes": torch.zeros(4, 8)}, r"codes are torch.float32 \[4, 8\], allowed is torch.int8"),
        ({"scale": torch.ones(4)}, r"scale is torch.float32 \[4\], allowed is floating \[4, 1\]"),
        ({"input_scale": torch.ones(2)}, r"input_scale is \[2\], allowed is \[1\] or None"),
        ({"bias": torch.ones(3)}, r"bias is torch.float32 \[3\], allowed is floating \[4\] or None"),
        (
            {"codes": torch.zeros(4, MAX_COLUMNS + 1, dtype=torch.int8)},
            "K=131072 is more than 131071, up to which 32 bits hold every sum",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Tensor], message: str) -> None:
    good = {"codes": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}
    with pytest.raises(ValueError, match=message):
        NativeW8A8(**(good | arguments))
    with pytest.raises(ValueError, match=r"x is \[2, 7\], allowed is \[..., 8\]"):
        NativeW8A8(**good)(torch.ones(2, 7))


@pytest.mark.parametrize("has_int8_matmul", [False, True])
@pytest.mark.parametrize("is_native", [False, True])
def test_which_body_is_chosen(
    is_native: bool, has_int8_matmul: bool, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_native and blocker is not None:
        pytest.skip(blocker)
    if not is_native:
        monkeypatch.setenv(native_library.SWITCH, "0")
    for module in (cpu_int8, dispatch):
        monkeypatch.setattr(module, "has_int8_matmul", lambda: has_int8_matmul)
    codes, scale = make_weight(33, 63)
    choice = choose_w8a8_gemm(codes, torch.bfloat16)
    reason = f"torch.bfloat16 on a CPU {'with' if has_int8_matmul else 'without'} 8-bit matrix products (VNNI)"
    body = "cpu int8 whole numbers"
    if not has_int8_matmul:
        body = "cpu native int8" if is_native else "cpu int8 as float16"
        reason += "" if is_native else "; QUANTKIT_NATIVE=0"
    assert str(choice) == f"w8a8_gemm: {body} ({reason})"
    weight, _ = prepack_w8a8(codes, scale, torch.bfloat16, STATIC, random(33))
    assert isinstance(weight, NativeW8A8 if body == "cpu native int8" else CpuW8A8)
    x = random(3, 63).bfloat16()
    torch.testing.assert_close(weight(x), reference.w8a8_gemm(x, codes, scale, STATIC, random(33)))


def test_it_is_for_weights_on_the_cpu() -> None:
    assert native_w8a8_blocker(torch.zeros(4, 8, dtype=torch.int8, device="meta")) == "the weight is on meta"
