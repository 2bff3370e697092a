"""Which body runs an operation, and why, in words.

A choice is made from what is known before the call (device, dtype, CPU), so that it can be shown in a report. Nothing
falls back in silence: a body that cannot run says why, and the reason travels with the choice.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.cpu_capability import describe_cpu, has_bfloat16_matmul
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


class ReferenceW4A16:
    """A 4-bit weight as the checkpoint stores it; calling it dequantizes and multiplies, as the reference does."""

    body = "reference"

    def __init__(self, weight_packed: Tensor, scale: Tensor, group_size: int) -> None:
        reference.check_w4a16(weight_packed, scale, group_size)
        self._weight_packed, self._scale, self._group_size = weight_packed, scale, group_size

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return self._weight_packed.nbytes + self._scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight."""
        return reference.w4a16_gemm(x, self._weight_packed, self._scale, self._group_size)


def choose_w4a16_gemm(weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> Choice:
    """The body of w4a16_gemm for one weight; ``function(weight_packed, scale, group_size)`` prepares it."""
    blocker = cpu_w4a16_blocker(weight_packed, scale, group_size, dtype)
    if blocker is not None:
        return Choice("w4a16_gemm", "reference", blocker, ReferenceW4A16)

    def prepack(weight_packed: Tensor, scale: Tensor, group_size: int) -> CpuW4A16:
        return CpuW4A16(weight_packed, scale, group_size, dtype)

    return Choice("w4a16_gemm", CpuW4A16.body, f"{dtype} on a CPU with {describe_cpu()}", prepack)
