"""Which body runs an operation, and why, in words.

A choice is made from what is known before the call (device, dtype, CPU), so that it can be shown in a report. Nothing
falls back in silence: a body that cannot run says why, and the reason travels with the choice.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_capability import describe_cpu, has_bfloat16_matmul, has_int8_matmul
from quantkit_kernels.cpu_int8 import CpuW8A8, CpuW8A16, cpu_int8_blocker
from quantkit_kernels.cpu_linear import widened_linear
from quantkit_kernels.cpu_w4a16 import CpuW4A16, cpu_w4a16_blocker


@dataclass(frozen=True, slots=True)
class Choice:
    """A body for an operation.

    Attributes:
        operation: name of the operation.
        body: name of the body.
        reason: why this one; one phrase.
        function: the body itself, with the operation's signature.
    """

    operation: str
    body: str
    reason: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.operation}: {self.body} ({self.reason})"


def triton_blocker(device: torch.device) -> str | None:
    """Why a Triton kernel cannot run on this device; None if it can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, Triton kernels need cuda"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0"
    return None


@cache
def choose_store_kv_cache(device: torch.device) -> Choice:
    """The body of store_kv_cache for tensors on ``device``."""
    blocker = triton_blocker(device)
    if blocker is not None:
        return Choice("store_kv_cache", "reference", blocker, reference.store_kv_cache)
    from quantkit_kernels.triton_store_kv_cache import store_kv_cache

    return Choice("store_kv_cache", "triton", f"tensors are on {device}", store_kv_cache)


@cache
def choose_linear(device: torch.device, dtype: torch.dtype) -> Choice:
    """The body of linear for tensors of ``dtype`` on ``device``."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16_matmul():
        return Choice("linear", "cpu widened", f"torch.bfloat16 on a CPU with {describe_cpu()}", widened_linear)
    return Choice("linear", "aten", f"{dtype} on {device.type}", torch.nn.functional.linear)


class ReferenceWeight:
    """A weight as it is given; calling it dequantizes and multiplies, as the reference does.

    Args:
        operation: of `reference`.
        arguments: all but the activations.
    """

    body = "reference"

    def __init__(self, operation: Callable[..., Tensor], *arguments: Tensor | int | None) -> None:
        self._operation, self._arguments = operation, arguments

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return sum(argument.nbytes for argument in self._arguments if isinstance(argument, Tensor))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight."""
        return self._operation(x, *self._arguments)


def choose_w4a16_gemm(weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> Choice:
    """The body of w4a16_gemm for one weight; ``function(weight_packed, scale, group_size, zero_point)`` prepares it."""
    blocker = cpu_w4a16_blocker(weight_packed, scale, group_size, dtype)
    if blocker is not None:
        return Choice("w4a16_gemm", "reference", blocker, partial(ReferenceWeight, reference.w4a16_gemm))

    def prepack(weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> CpuW4A16:
        return CpuW4A16(weight_packed, scale, group_size, dtype, zero_point)

    return Choice("w4a16_gemm", CpuW4A16.body, f"{dtype} on a CPU with {describe_cpu()}", prepack)


def choose_w8a16_gemm(codes: Tensor, dtype: torch.dtype) -> Choice:
    """The body of w8a16_gemm for one weight; ``function(codes, scale, group_size, zero_point)`` prepares it."""
    blocker = cpu_int8_blocker(codes, dtype)
    if blocker is not None:
        return Choice("w8a16_gemm", "reference", blocker, partial(ReferenceWeight, reference.w8a16_gemm))

    def prepack(codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> CpuW8A16:
        return CpuW8A16(codes, scale, group_size, dtype, zero_point)

    return Choice("w8a16_gemm", CpuW8A16.body, f"{dtype} on a CPU with {describe_cpu()}", prepack)


def choose_w8a8_gemm(codes: Tensor, dtype: torch.dtype) -> Choice:
    """The body of w8a8_gemm for one weight; ``function(codes, scale, input_scale)`` prepares it."""
    blocker = cpu_int8_blocker(codes, dtype)
    if blocker is not None:
        return Choice("w8a8_gemm", "reference", blocker, partial(ReferenceWeight, reference.w8a8_gemm))

    def prepack(codes: Tensor, scale: Tensor, input_scale: Tensor | None) -> CpuW8A8:
        return CpuW8A8(codes, scale, dtype, input_scale)

    body = "cpu int8 whole numbers" if has_int8_matmul() else "cpu int8 widened"
    fast = "with" if has_int8_matmul() else "without"
    return Choice("w8a8_gemm", body, f"{dtype} on a CPU {fast} 8-bit matrix products (VNNI)", prepack)
