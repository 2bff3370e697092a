"""Triton bodies on CPU tensors, in Triton's interpreter: for tests, and for a dry run where there is no GPU.

The interpreter replaces the compiler when a kernel is defined, so TRITON_INTERPRET=1 must be set before triton is
imported.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from quantkit_kernels import dispatch


@contextmanager
def interpret_triton() -> Iterator[None]:
    """Within this context `dispatch` chooses Triton bodies for tensors on the CPU.

    Raises:
        RuntimeError: TRITON_INTERPRET=1 is not set.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    with bfloat16_in_the_interpreter(), patch.object(dispatch, "_interprets", True):
        _forget_choices()
        try:
            yield
        finally:
            _forget_choices()


def _forget_choices() -> None:
    dispatch.choose.cache_clear()
    dispatch.choose_linear.cache_clear()


def _widen(bits: Any) -> Any:
    """float32 of bfloat16, which the interpreter holds as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(wide: Any) -> Any:
    """bfloat16 as uint16, to the nearest, ties to even."""
    tensor = torch.from_numpy(np.atleast_1d(np.ascontiguousarray(wide, dtype=np.float32)))
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(wide))


@contextmanager
def bfloat16_in_the_interpreter() -> Iterator[None]:
    """Give the interpreter what it lacks: it rounds bfloat16 towards zero and calculates with its bits."""
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

    corrected: dict[str, Any] = {
        "cast_impl": cast_rightly,
        "create_fp_to_fp": convert_rightly,
        "binary_op": calculate_rightly,
        "create_dot": dot_rightly,
    }
    with patch.multiple(builder, **corrected):
        yield
