"""The Triton bodies of w4a16_gemm in the interpreter: layout, products, the choice between bodies."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from quantkit_kernels import crossover_table, dispatch, gpu_crossover, prepack_w4a16, reference
from quantkit_kernels.choices import choices_text
from quantkit_kernels.crossover_table import crossover
from quantkit_kernels.tiling import choose_splits
from quantkit_kernels.triton_split_k import add_splits
from quantkit_kernels.triton_w4a16 import TritonW4A16, w4a16_gemm
from quantkit_kernels.triton_w8a16 import TritonW8A16
from quantkit_kernels.w4a16_layout import from_words, to_words

AssertNear = Callable[[Tensor, Tensor], None]
WEIGHTS = [  # N, K, group size; blocks have 128 columns, and 1,056 and 1,024 columns are cut into two runs
    (48, 64, 32), (70, 160, 32), (33, 192, 64), (80, 256, 128), (40, 96, -1), (24, 1056, 32), (17, 1024, 512)
]  # fmt: skip


def make_weight(out_features: int, in_features: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All bit patterns, scales of both signs, all zero points."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    words = torch.randint(-(2**31), 2**31, (out_features, in_features // 8), generator=generator).to(torch.int32)
    groups = 1 if group_size == -1 else in_features // group_size
    scale = torch.randn(out_features, groups, generator=generator).to(torch.bfloat16)
    return words, scale, torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)


def make_input(rows: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Rows with NaN behind them: what lies past K must not be read, or count for nothing."""
    values = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    if rows > 2:
        values[1] = 0
    buffer = torch.full((rows + 1, in_features + 160), float("nan"), dtype=dtype)
    buffer[:rows, :in_features] = values
    return buffer[:rows, :in_features]


@pytest.mark.parametrize("rows", [1, 3, 16, 63])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_the_product_is_that_of_the_reference(
    out_features: int, in_features: int, group_size: int, rows: int, has_zero: bool, assert_near: AssertNear,
    unwritten_is_nan: None,
) -> None:  # fmt: skip
    dtype = torch.bfloat16 if has_zero else torch.float16
    words, scale, zero_point = make_weight(out_features, in_features, group_size)
    x = make_input(rows, in_features, dtype)
    zeros = zero_point if has_zero else None
    wanted = reference.w4a16_gemm(x, words, scale, group_size, zeros)
    assert_near(w4a16_gemm(x, words, scale, group_size, zeros), wanted)


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
def test_a_row_alone_may_take_the_tensor_cores_too(
    out_features: int, in_features: int, group_size: int, assert_near: AssertNear, unwritten_is_nan: None
) -> None:
    words, scale, zero_point = make_weight(out_features, in_features, group_size)
    weight = TritonW4A16(words, scale, group_size, torch.bfloat16, zero_point)
    x = make_input(1, in_features, torch.bfloat16)
    assert_near(weight.gemm(x), reference.w4a16_gemm(x, words, scale, group_size, zero_point))


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), WEIGHTS)
@pytest.mark.parametrize("has_zero", [False, True])
def test_many_rows_are_multiplied_by_the_dequantized_weight(
    out_features: int, in_features: int, group_size: int, has_zero: bool, assert_near: AssertNear,
    unwritten_is_nan: None,
) -> None:  # fmt: skip
    words, scale, zero_point = make_weight(out_features, in_features, group_size)
    zeros = zero_point if has_zero else None
    weight = TritonW4A16(words, scale, group_size, torch.bfloat16, zeros)
    dense = reference.dequantize(reference.unpack_int4(words), scale, zeros).to(torch.bfloat16)
    assert torch.equal(weight.dequantize(), dense)
    weight.crossover = dataclasses.replace(weight.crossover, w4a16_packed_rows=4)
    x = make_input(5, in_features, torch.bfloat16)
    assert torch.equal(weight(x), torch.nn.functional.linear(x, dense))


def test_any_strides_and_no_row(assert_near: AssertNear) -> None:
    words, scale, _ = make_weight(48, 64, 32)
    weight = TritonW4A16(words, scale, 32, torch.float16)
    x = torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(0)).half().permute(1, 2, 0)
    assert x.stride(-1) != 1
    assert_near(weight(x), reference.w4a16_gemm(x, words, scale, 32))
    assert weight(x[:0]).shape == (0, 3, 48)


def test_the_layout_is_what_its_page_says() -> None:
    words, _, _ = make_weight(5, 160, 32)
    codes = reference.unpack_int4(words)
    laid_out = to_words(words)
    assert (laid_out.shape, laid_out.dtype) == ((2, 5, 32), torch.int16)
    for n in range(5):
        for k in range(160):
            block, i, j = k // 128, k % 128 // 32, k % 32
            assert (int(laid_out[block, n, j]) >> (4 * i)) & 15 == int(codes[n, k]) + 8
    assert torch.equal(from_words(laid_out, 160), codes)
    assert not (laid_out[1] & ~0xF).any()  # past K: the code 0
    with pytest.raises(ValueError, match="K=40, allowed is a multiple of 32"):
        to_words(words[:, :5])


def test_splits_are_added_in_their_order(unwritten_is_nan: None) -> None:
    parts = torch.randn(5, 3, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, 6, 5).view(5, 1, 1)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    out = torch.empty(3, 300)
    add_splits(parts, out)
    assert torch.equal(out, total)
    row_scale, column_scale, bias = torch.rand(3), torch.rand(300), torch.rand(300)
    add_splits(parts, out, row_scale, column_scale, bias)
    torch.testing.assert_close(out, total * row_scale.unsqueeze(1) * column_scale + bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tiles", "steps", "splits"), [(1, 7, 1), (1, 8, 2), (64, 32, 4), (448, 32, 1), (1, 999, 16)])
def test_columns_are_cut_until_there_are_enough_programs(tiles: int, steps: int, splits: int) -> None:
    assert choose_splits(tiles, steps) == splits


def test_what_the_kernels_cannot_take_is_refused() -> None:
    words, scale, _ = make_weight(16, 192, 32)
    with pytest.raises(ValueError, match=r"activations are torch.float32, not torch.bfloat16 or torch.float16"):
        TritonW4A16(words, scale, 32, torch.float32)
    with pytest.raises(ValueError, match="group_size=96 is not -1, 32, 64 or a multiple of 128"):
        TritonW4A16(words, scale[:, :2], 96, torch.float16)
    with pytest.raises(ValueError, match="K=40 is not a multiple of 32"):
        TritonW4A16(words[:, :5], scale[:, :1], -1, torch.float16)
    weight = TritonW4A16(words, scale, 32, torch.float16)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 \[2, 192\], allowed is torch.float16 \[\.\.\., 192\]"):
        weight(torch.zeros(2, 192, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="x is on meta, allowed is the device of the weight, cpu"):
        weight(torch.zeros(2, 192, dtype=torch.float16, device="meta"))


def test_a_gpu_gets_the_triton_bodies_and_the_reason_names_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_blocker", lambda device: None)
    monkeypatch.setattr(dispatch, "_crossover_of", lambda device: crossover("NVIDIA H200"))
    words, scale, _ = make_weight(16, 64, 32)
    weight, reason = prepack_w4a16(words, scale, 32, torch.bfloat16)
    assert isinstance(weight, TritonW4A16)
    assert reason.startswith("up to 384 rows; dequantized for more (estimate from the roofline")
    assert weight.nbytes < words.nbytes * 2 + scale.nbytes + 1  # 64 columns are half a block
    weight, reason = prepack_w4a16(words, scale, 32, torch.float32)
    assert (weight.body, reason) == ("reference", "activations are torch.float32, not torch.bfloat16 or torch.float16")


def test_the_crossover_table_says_where_its_numbers_come_from() -> None:
    table = json.loads(crossover_table.TABLE.read_text())
    assert {"default", "NVIDIA H200"} <= table.keys()
    for name in table:
        entry = crossover_table.crossover(name)
        assert entry.source.startswith(("estimate", "measured"))
        assert 0 <= entry.w4a16_gemv_rows <= 1 <= entry.w4a16_packed_rows
        if entry.source.startswith("estimate"):
            assert entry.w4a16_packed_rows == crossover_table.estimate_packed_rows(bits=4)
            assert entry.w8a16_packed_rows == crossover_table.estimate_packed_rows(bits=8)
    assert crossover_table.crossover("a device nobody measured") == crossover_table.crossover("default")


def test_a_measured_crossover_replaces_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says what was called: packed kernels slow down with the rows, dequantizing does not."""
    calls: list[str] = []
    for weight in (TritonW4A16, TritonW8A16):
        monkeypatch.setattr(weight, "gemm", lambda self, x: calls.append(f"packed {x.shape[0]}"))
        monkeypatch.setattr(weight, "gemv", lambda self, x: calls.append("gemv"))
        monkeypatch.setattr(weight, "dequantize", lambda self: calls.append("dense") or torch.zeros(1, 256).bfloat16())
    monkeypatch.setattr(gpu_crossover, "SHAPES", ((16, 256),))

    def timer(function: Callable[[], object]) -> float:
        function()
        name, _, rows = calls[-1].partition(" ")
        return {"gemv": 2.0, "dense": 130.0}.get(name) or float(rows)

    entry = gpu_crossover.measure_crossover(torch.device("cpu"), timer)
    assert (entry.w4a16_gemv_rows, entry.w4a16_packed_rows) == (0, 128)
    table = tmp_path / "crossover.json"
    table.write_text(crossover_table.TABLE.read_text())
    crossover_table.write_crossover("a new device", entry, table)
    written = json.loads(table.read_text())
    assert written["a new device"]["source"].startswith("measured: bfloat16, group 128")
    assert written["NVIDIA H200"] == json.loads(crossover_table.TABLE.read_text())["NVIDIA H200"]
    assert gpu_crossover.most_rows({1: 2.0, 16: 1.0}, {1: 1.0, 16: 9.0}) == 1


def test_the_choices_of_this_machine_are_said_in_words() -> None:
    lines = choices_text(torch.bfloat16)
    assert lines[0] == "CPU, activations in torch.bfloat16:"
    assert "  gptq_columns: reference (tensors are on cpu, Triton kernels need cuda)" in lines
    bodies = ("  w4a16_gemm: cpu int4pack (", "  w4a16_gemm: cpu native int4 (")
    assert sum(line.startswith(bodies) for line in lines) == 1


def test_signatures_are_those_of_the_reference() -> None:
    assert inspect.signature(w4a16_gemm) == inspect.signature(reference.w4a16_gemm)
