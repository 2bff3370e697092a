"""The CPU bodies of norms, rotary embedding, gates and 16-bit products against their references."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels import (
    cpu_half,
    dispatch,
    gelu_mul,
    native_library,
    prepack_linear,
    reference,
    rms_norm,
    rotary_embedding,
    silu_mul,
)
from quantkit_kernels.cpu_half import CpuHalf, cpu_half_blocker
from quantkit_kernels.cpu_native_linear import NativeHalf
from quantkit_kernels.dispatch import CPU_MODULES, NATIVE, DenseWeight, activation_dtype, choose

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Within the rounding of the type: of float32 sums in another order, or of one bfloat16 step."""
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["torch", "native"], autouse=True)
def bodies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All tests with the bodies that need no compiler, and with the compiled ones."""
    if request.param == "torch":
        monkeypatch.setenv(native_library.SWITCH, "0")
    remembered = native_library.native_blocker, choose, native_library.native_library
    for function in remembered:
        function.cache_clear()
    blocker = native_library.native_blocker()
    if request.param == "native" and blocker is not None:
        pytest.skip(blocker)
    yield request.param
    for function in remembered:
        function.cache_clear()


@pytest.mark.parametrize("operation", CPU_MODULES)
def test_a_body_has_the_signature_of_its_reference(operation: str, bodies: str) -> None:
    choice = choose(operation, CPU)
    assert choice.body == ("cpu native" if bodies == "native" and operation in NATIVE else "cpu")
    found, wanted = (inspect.signature(f).parameters for f in (choice.function, getattr(reference, operation)))
    assert list(found.values()) == list(wanted.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float, dtype: torch.dtype) -> None:
    x, residual, weight = random(7, 48).to(dtype), random(7, 48, seed=1).to(dtype), random(48, seed=2).to(dtype)
    before = residual.clone()
    assert_near(rms_norm(x, weight, 1e-2, offset=offset), reference.rms_norm(x, weight, 1e-2, offset=offset))
    found = rms_norm(x, weight, 1e-2, residual=residual, offset=offset)
    for own, wanted in zip(found, reference.rms_norm(x, weight, 1e-2, residual=residual, offset=offset), strict=True):
        assert_near(own, wanted)
    assert torch.equal(residual, before)
    assert not rms_norm(torch.zeros(1, 48), weight, 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [8, 5])
@pytest.mark.parametrize("layout", ["one projection", "apart", "other order"])
def test_rotary_embedding(layout: str, half: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Queries and keys of one projection are turned in one go, others each alone; what is not turned stays."""
    qkv = random(5, 8, 16).to(dtype)
    if layout == "one projection":
        q, k = qkv[:, :4], qkv[:, 4:6]
    elif layout == "apart":
        q, k = qkv[:, :4].clone(), qkv[:, 4:6].clone()
    else:
        q, k = qkv[:, 2:6], qkv[:, :2]
    wanted_q, wanted_k, values = q.clone(), k.clone(), qkv[:, 6:].clone()
    cos, sin = random(5, half, seed=1), random(5, half, seed=2)
    reference.rotary_embedding(wanted_q, wanted_k, cos, sin, interleaved=interleaved)
    rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    assert_near(q, wanted_q)
    assert_near(k, wanted_k)
    assert torch.equal(qkv[:, 6:], values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    x = 3 * random(6, 40).to(dtype)
    assert_near(silu_mul(x), reference.silu_mul(x))
    for tanh in (False, True):
        assert_near(gelu_mul(x, tanh), reference.gelu_mul(x, tanh))


@pytest.fixture
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CPU that multiplies no bfloat16."""
    monkeypatch.setattr(dispatch, "has_bfloat16_matmul", lambda: False)
    dispatch.choose_linear.cache_clear()
    yield
    dispatch.choose_linear.cache_clear()


needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch carries no FBGEMM for this CPU"
)


@needs_fbgemm
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("out_features", [16, 33, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_float16_products(
    has_bias: bool, out_features: int, rows: int, bodies: str, without_bfloat16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in several; in float32 the weights are the very same numbers."""
    weight = random(out_features, 72).bfloat16()
    bias = random(out_features, seed=1).bfloat16() if has_bias else None
    x = random(rows, 72, seed=2)
    wanted = reference.linear(x, weight.float(), None if bias is None else bias.float())
    for piece_rows in (3072, 40):
        monkeypatch.setattr(cpu_half, "PIECE_ROWS", piece_rows)
        prepared, reason = prepack_linear(weight, bias)
        assert isinstance(prepared, NativeHalf if bodies == "native" else CpuHalf)
        assert reason.startswith("torch.bfloat16 on a CPU with ")
        torch.testing.assert_close(prepared(x), wanted, rtol=1e-4, atol=1e-4)
        assert_near(prepared(x.bfloat16()), reference.linear(x.bfloat16(), weight, bias))
        assert 2 * weight.numel() <= prepared.nbytes <= 2 * (out_features + 15) * 72 + 4 * out_features


@needs_fbgemm
def test_float16_holds_whole_numbers_and_bfloat16_numbers_exactly() -> None:
    eye = torch.eye(64)
    powers = torch.exp2(torch.arange(-17, 15).float()).repeat(2)
    weights = (powers * random(16, 64).sign() * 1.9921875).bfloat16()
    codes = torch.randint(-128, 128, (16, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    for weight in (weights, codes):
        assert torch.equal(CpuHalf(weight)(eye), weight.float().t())


@needs_fbgemm
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 70000.0])
def test_weights_that_float16_does_not_hold_stay_as_they_are(value: float, without_bfloat16: None) -> None:
    weight = random(16, 32).bfloat16()
    weight[3, 4] = value
    prepared, reason = prepack_linear(weight)
    assert isinstance(prepared, DenseWeight)
    assert reason.startswith("float16 does not hold weights up to ")
    with pytest.raises(ValueError, match="float16 does not hold"):
        CpuHalf(weight)
    assert cpu_half_blocker(torch.full((4, 4), 1e-5)) == "float16 does not hold weights up to 1e-05"
    if value == 70000.0:
        x = random(5, 32, seed=1)
        assert_near(prepared(x.bfloat16()), reference.linear(x.bfloat16(), weight))
        assert prepared(x).dtype == torch.float32


def test_activations_are_wide_where_bfloat16_is_widened_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bfloat16, wanted in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(dispatch, "has_bfloat16_matmul", lambda has_bfloat16=has_bfloat16: has_bfloat16)
        assert activation_dtype(CPU, torch.bfloat16) == wanted
        assert activation_dtype(CPU, torch.float32) == torch.float32
        assert activation_dtype(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
