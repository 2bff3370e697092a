"""w4a16_gemm: the reference against compressed-tensors, the packed CPU body against the reference, the fallbacks."""

import inspect
import json
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quantkit_kernels
from quantkit_kernels import cpu_w4a16, int4pack_layout, prepack_w4a16, reference, w4a16_gemm
from quantkit_kernels.cpu_capability import has_bfloat16_matmul
from quantkit_kernels.cpu_linear import MIN_WIDENED_ROWS, widened_linear
from quantkit_kernels.cpu_w4a16 import MAX_INT4_ROWS, CpuW4A16
from quantkit_kernels.dispatch import ReferenceWeight, choose_linear

pytestmark = pytest.mark.usefixtures("without_native")  # its own tests are in test_native.py

# Relative to the largest output. float32: sums in another order. bfloat16: one rounding of the output (2**-9) that may
# fall on the other side; where the dense product runs in bfloat16, also one rounding of each weight.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def make_weight(out_features: int, in_features: int, group_size: int) -> tuple[Tensor, Tensor]:
    """All bit patterns, and scales of both signs."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    words = torch.randint(-(2**31), 2**31, (out_features, in_features // 8), generator=generator).to(torch.int32)
    groups = 1 if group_size == -1 else in_features // group_size
    scale = torch.randn(out_features, groups, generator=generator).to(torch.bfloat16)
    assert (scale < 0).any()
    return words, scale


def assert_near(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    error = (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("name", quantkit_kernels.__all__)
def test_a_public_operation_has_the_signature_of_its_reference(name: str) -> None:
    operation = getattr(quantkit_kernels, name)
    if inspect.isclass(operation) or name.startswith("prepack_"):  # a type, and preparations of other operations
        assert not hasattr(reference, name)
        return
    assert inspect.signature(operation) == inspect.signature(getattr(reference, name))


def test_the_triton_launcher_has_the_signature_of_its_reference() -> None:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_store_kv_cache import store_kv_cache

    assert inspect.signature(store_kv_cache) == inspect.signature(reference.store_kv_cache)
    assert inspect.signature(widened_linear) == inspect.signature(reference.linear)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_codes_are_unpacked_as_compressed_tensors_packs_them() -> None:
    packing: ModuleType = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (5, 48), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(reference.unpack_int4(packing.pack_to_int32(codes, 4)), codes)


def test_the_reference_is_the_formula() -> None:
    words, scale = make_weight(3, 16, 8)
    codes = reference.unpack_int4(words)
    x = torch.randn(2, 16, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    wanted = torch.zeros(2, 3, dtype=torch.float64)
    for n in range(3):
        for k in range(16):
            wanted[:, n] += x[:, k].double() * int(codes[n, k]) * float(scale[n, k // 8])
    torch.testing.assert_close(reference.w4a16_gemm(x, words, scale, 8).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 16, 63, MAX_INT4_ROWS, MAX_INT4_ROWS + 1, 200])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size"),
    [(16, 32, 32), (48, 64, 64), (80, 192, 64), (112, 384, 128), (144, 512, 256), (192, 576, 64)],
)
def test_the_packed_body_equals_the_reference(
    dtype: torch.dtype, rows: int, out_features: int, in_features: int, group_size: int
) -> None:
    words, scale = make_weight(out_features, in_features, group_size)
    weight, _ = prepack_w4a16(words, scale, group_size, dtype)
    assert isinstance(weight, CpuW4A16)
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert_near(weight(x), reference.w4a16_gemm(x, words, scale, group_size))


@pytest.mark.parametrize("rows", [2, MAX_INT4_ROWS + 3])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_both_kinds_of_cpu_get_the_right_product(
    rows: int, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_w4a16, "has_bfloat16_matmul", lambda: has_bfloat16)
    words, scale = make_weight(80, 192, 64)
    weight = CpuW4A16(words, scale, 64, torch.bfloat16)
    assert weight.dense_dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    assert_near(weight(x), reference.w4a16_gemm(x, words, scale, 64))


def test_pieces_and_leading_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense product in many small pieces, on an input that is neither flat nor contiguous."""
    monkeypatch.setattr(cpu_w4a16, "PIECE_ELEMENTS", 1)
    words, scale = make_weight(208, 128, 32)
    weight = CpuW4A16(words, scale, 32, torch.float32)
    x = torch.randn(5, 128, 7, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    assert_near(weight(x), reference.w4a16_gemm(x, words, scale, 32))


def test_one_call_equals_the_reference() -> None:
    words, scale = make_weight(32, 64, 32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert_near(w4a16_gemm(x, words, scale, 32), reference.w4a16_gemm(x, words, scale, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weight_stays_packed(dtype: torch.dtype) -> None:
    words, scale = make_weight(256, 1024, 64)
    weight, _ = prepack_w4a16(words, scale, 64, dtype)
    scales = scale.numel() * 3 * 4  # (scale, zero) and the scales once more, float32 at most
    assert weight.nbytes <= words.nbytes + scales
    weight(torch.randn(100, 1024).to(dtype))  # a large product keeps nothing
    assert weight.nbytes <= words.nbytes + scales


@pytest.mark.parametrize(
    ("out_features", "in_features", "group_size", "dtype", "reason"),
    [
        (24, 64, 32, torch.bfloat16, "N=24 is not a multiple of 16"),
        (32, 64, 16, torch.bfloat16, "group_size=16 is not one of 32, 64, 128, 256"),
        (32, 64, -1, torch.bfloat16, "group_size=-1 is not one of 32, 64, 128, 256"),
        (32, 64, 32, torch.float16, "activations are torch.float16, not torch.bfloat16 or torch.float32"),
    ],
)
def test_what_the_packed_body_cannot_take_goes_to_the_reference_and_says_why(
    out_features: int, in_features: int, group_size: int, dtype: torch.dtype, reason: str
) -> None:
    words, scale = make_weight(out_features, in_features, group_size)
    weight, why = prepack_w4a16(words, scale, group_size, dtype)
    assert isinstance(weight, ReferenceWeight)
    assert why == reason
    assert weight.nbytes == words.nbytes + scale.nbytes
    x = torch.randn(3, in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(weight(x), reference.w4a16_gemm(x, words, scale, group_size))


def test_scales_that_would_be_rounded_go_to_the_reference() -> None:
    words, scale = make_weight(32, 64, 32)
    weight, why = prepack_w4a16(words, scale.half() * 1.001, 32, torch.bfloat16)
    assert isinstance(weight, ReferenceWeight)
    assert why == "the scales in torch.float16 cannot be written in the activations' torch.bfloat16 without loss"


def test_an_unknown_layout_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_w4a16, "split_panels", lambda out_features: None)
    weight, why = prepack_w4a16(*make_weight(32, 64, 32), 32, torch.bfloat16)
    assert isinstance(weight, ReferenceWeight)
    assert "layout" in why


@pytest.mark.parametrize("out_features", [16, 32, 48, 64, 80, 96, 112, 160])
def test_the_probed_layout_is_that_of_the_packer(out_features: int) -> None:
    codes = torch.randint(0, 16, (out_features, 32), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    flat = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).flatten()
    runs = int4pack_layout.split_panels(out_features)
    assert runs is not None
    assert sum(count * panel.width for count, panel in runs) == out_features
    start = 0
    for count, panel in runs:
        for _ in range(count):
            nbytes = panel.width * 16
            panel_bytes = flat[start * 16 : start * 16 + nbytes].view(32, -1)
            found = torch.stack([panel_bytes & 15, panel_bytes >> 4], dim=1).flatten(1)  # [K, width]
            rows = torch.arange(panel.width) if panel.rows is None else panel.rows
            assert torch.equal(found, codes[start : start + panel.width][rows].t().to(torch.uint8))
            start += panel.width


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w, s, g: (w.long(), s, g), r"weight_packed is torch.int64 \[32, 8\], allowed is torch.int32"),
        (lambda w, s, g: (w, s[:, :1], g), r"scale is torch.bfloat16 \[32, 1\], allowed is floating \[32, 2\]"),
        (lambda w, s, g: (w, s.int(), g), r"scale is torch.int32 .* allowed is floating"),
        (lambda w, s, g: (w, s, 48), r"group_size=48, allowed is -1 or a divisor of K=64"),
        (lambda w, s, g: (w, s, 0), r"group_size=0, allowed is -1 or a divisor of K=64"),
        (lambda w, s, g: (w, s.to("meta"), g), r"scale is on meta, allowed is the device of the weight, cpu"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(spoil: object, message: str) -> None:
    arguments = spoil(*make_weight(32, 64, 32), 32)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        w4a16_gemm(torch.randn(2, 64), *arguments)
    with pytest.raises(ValueError, match=message):
        reference.w4a16_gemm(torch.randn(2, 64), *arguments)


def test_activations_that_do_not_fit_are_refused() -> None:
    words, scale = make_weight(32, 64, 32)
    for x in (torch.randn(2, 32), torch.randn(2, 64).double()):
        with pytest.raises(ValueError, match=r"x is .* allowed is \[\.\.\., 64\]"):
            reference.w4a16_gemm(x, words, scale, 32)
    weight, _ = prepack_w4a16(words, scale, 32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is torch.float16 \[2, 64\], allowed is torch.bfloat16 \[\.\.\., 64\]"):
        weight(torch.randn(2, 64).half())


@pytest.mark.parametrize("rows", [1, MIN_WIDENED_ROWS - 1, MIN_WIDENED_ROWS, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("piece", [1 << 18, 500])
def test_the_widened_product_equals_the_reference(
    rows: int, has_bias: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit_kernels.cpu_linear.PIECE_ELEMENTS", piece)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((1, rows, 72), (40, 72)))
    bias = torch.randn(40, generator=generator).to(torch.bfloat16) if has_bias else None
    wanted = reference.linear(x, weight, bias)
    torch.testing.assert_close(widened_linear(x, weight, bias), wanted, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(quantkit_kernels.linear(x, weight, bias), wanted, rtol=2**-7, atol=2**-7)


def test_linear_is_atens_wherever_that_is_fast() -> None:
    assert choose_linear(torch.device("cpu"), torch.float32).function is F.linear
    choice = choose_linear(torch.device("cpu"), torch.bfloat16)
    assert (choice.body == "aten") == has_bfloat16_matmul()
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(reference.linear(x, x), F.linear(x, x))


def test_the_crossover_can_be_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantkit_kernels import crossover

    monkeypatch.setattr(crossover, "SHAPES", ((32, 64),))
    monkeypatch.setattr(crossover, "ROWS", (1, 5))
    threads = torch.get_num_threads()
    try:
        crossover.main()
    finally:
        torch.set_num_threads(threads)
    machine, *records = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert machine.keys() == {"cpu", "torch"}
    assert [record["rows"] for record in records] == [1, 5]
    assert all(record[f"{body}_us"] > 0 for record in records for body in ("int4pack", "dequantized", "bfloat16"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, MAX_INT4_ROWS, MAX_INT4_ROWS + 1])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), [(48, 64, 64), (112, 384, 32), (192, 576, 64)])
def test_zero_points_are_those_of_the_reference(
    out_features: int, in_features: int, group_size: int, rows: int, dtype: torch.dtype
) -> None:
    words, scale = make_weight(out_features, in_features, group_size)
    generator = torch.Generator().manual_seed(rows)
    zero_point = torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight, _ = prepack_w4a16(words, scale, group_size, dtype, zero_point)
    assert weight.body == "cpu int4pack"
    assert_near(weight(x), reference.w4a16_gemm(x, words, scale, group_size, zero_point))
    assert not torch.allclose(weight(x).float(), reference.w4a16_gemm(x, words, scale, group_size).float(), atol=0.5)
    with pytest.raises(ValueError, match=r"zero_point is torch\.int64"):
        w4a16_gemm(x, words, scale, group_size, zero_point.long())


def test_packing_is_the_opposite_of_unpacking() -> None:
    words, _ = make_weight(24, 64, 32)
    assert torch.equal(reference.pack_int4(reference.unpack_int4(words)), words)
