"""What the tests of kernels share: one table of tolerances, outputs that start as NaN, bfloat16 in the interpreter."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Largest error of an output, relative to the largest output of the reference.
# float32: sums in another order. 16 bits: one rounding of the output that may fall on the other side (float16 2**-11,
# bfloat16 2**-8), and where the dense product runs in that type also one rounding of each weight.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
AssertNear = Callable[[Tensor, Tensor], None]


@pytest.fixture(scope="session")
def assert_near() -> AssertNear:
    """``assert_near(actual, wanted)``: same type and shape, no NaN, and an error within the table of tolerances."""

    def check(actual: Tensor, wanted: Tensor) -> None:
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        error = (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-20)
        assert error <= TOLERANCE[actual.dtype], f"error {error:.2e}, allowed {TOLERANCE[actual.dtype]:.2e}"

    return check


@pytest.fixture
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` returns with NaN (85 in whole numbers): an element that no kernel writes is seen."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def spoiled(*arguments: Any, make: Callable[..., Tensor] = make, **keywords: Any) -> Tensor:
            tensor = make(*arguments, **keywords)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

        monkeypatch.setattr(torch, name, spoiled)


def _widen(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, which Triton's interpreter holds as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(wide: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16, to the nearest, ties to even."""
    tensor = torch.from_numpy(np.atleast_1d(np.ascontiguousarray(wide, dtype=np.float32)))
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(wide))


@pytest.fixture(scope="session", autouse=True)
def bfloat16_in_the_interpreter() -> Iterator[None]:
    """Give Triton's interpreter what it lacks: it rounds bfloat16 towards zero and calculates with its bits."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder, handle, bf16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl.bfloat16
    fp32 = interpreter.tl.float32
    cast, binary, dot, convert = builder.cast_impl, builder.binary_op, builder.create_dot, builder.create_fp_to_fp

    def widened(tensor: Any) -> Any:
        return handle(_widen(tensor.data), fp32) if tensor.dtype.scalar == bf16 else tensor

    def cast_rightly(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar == bf16 and source.dtype.scalar != bf16:
            return handle(_round(source.data.astype(np.float32)), bf16)
        return cast(self, widened(source), kind)

    def convert_rightly(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        is_bfloat16 = bf16 in (kind.scalar, source.dtype.scalar)
        return cast_rightly(self, source, kind) if is_bfloat16 else convert(self, source, kind, rounding)

    def calculate_rightly(self: Any, left: Any, right: Any, function: Any) -> Any:
        if left.dtype.scalar != bf16:
            return binary(self, left, right, function)
        result = function(_widen(left.data), _widen(right.data))
        return handle(_round(result), bf16) if result.dtype != np.bool_ else handle(result, interpreter.tl.int1)

    def dot_rightly(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return dot(self, widened(left), widened(right), *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in {
            "cast_impl": cast_rightly, "create_fp_to_fp": convert_rightly,
            "binary_op": calculate_rightly, "create_dot": dot_rightly,
        }.items():  # fmt: skip
            patch.setattr(builder, name, function)
        yield
