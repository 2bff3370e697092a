"""What the tests of kernels share: one table of tolerances, outputs that start as NaN, bfloat16 in the interpreter."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels import native_library
from quantkit_kernels.dispatch import choose
from quantkit_kernels.interpreter import bfloat16_in_the_interpreter

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
    with torch.device("meta"):  # notes once which functions make tensors; noted below, torch.empty would be missing
        torch.zeros(0)
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def spoiled(*arguments: Any, make: Callable[..., Tensor] = make, **keywords: Any) -> Tensor:
            tensor = make(*arguments, **keywords)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

        monkeypatch.setattr(torch, name, spoiled)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What was found out about the library does not outlive a test."""
    remembered = native_library.native_library, native_library.native_blocker, choose
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def without_native(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without compiled bodies."""
    monkeypatch.setenv(native_library.SWITCH, "0")


@pytest.fixture(scope="session", autouse=True)
def bfloat16() -> Iterator[None]:
    """Give Triton's interpreter what it lacks."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    with bfloat16_in_the_interpreter():
        yield
