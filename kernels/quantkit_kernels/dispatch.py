"""Which body runs an operation, and why, in words.

A choice is made from what is known before the call (device, dtype, CPU), so that it can be shown in a report. Nothing
falls back in silence: a body that cannot run says why, and the reason travels with the choice.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import cpu_native, reference
from quantkit_kernels.cpu_capability import describe_cpu, has_bfloat16_matmul, has_int8_matmul
from quantkit_kernels.cpu_half import CpuHalf, cpu_half_blocker
from quantkit_kernels.cpu_int8 import WHOLE_NUMBERS, CpuW8A8, CpuW8A16, cpu_int8_blocker, w8a8_body
from quantkit_kernels.cpu_linear import widened_linear
from quantkit_kernels.cpu_native import BODY
from quantkit_kernels.cpu_native_int8 import NativeW8A8, native_w8a8_blocker
from quantkit_kernels.cpu_native_linear import NativeHalf, NativeW4A16, native_half_blocker, native_w4a16_blocker
from quantkit_kernels.cpu_w4a16 import CpuW4A16, cpu_w4a16_blocker
from quantkit_kernels.crossover_table import DEFAULT, Crossover, crossover
from quantkit_kernels.native_library import native_blocker
from quantkit_kernels.weight_limits import w4a16_blocker, w8a8_blocker, w8a16_blocker


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


_interprets = False  # `interpreter.interpret_triton` sets it


def triton_blocker(device: torch.device) -> str | None:
    """Why a Triton kernel cannot run on this device; None if it can."""
    if device.type == "cpu" and _interprets:
        return None
    if device.type != "cuda":
        return f"tensors are on {device.type}, Triton kernels need cuda"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0"
    return None


TRITON_MODULES = {
    "apply_token_bitmask": "triton_sampling",
    "gelu_mul": "triton_activation",
    "gptq_columns": "triton_calibration",
    "hessian_accumulate": "triton_calibration",
    "paged_attention": "triton_paged_attention",
    "quantize_per_token": "triton_quantize",
    "rms_norm": "triton_norm",
    "rms_norm_quantize": "triton_quantize",
    "rotary_embedding": "triton_rotary",
    "sample_tokens": "triton_sampling",
    "silu_mul": "triton_activation",
    "silu_mul_quantize": "triton_quantize",
    "store_kv_cache": "triton_store_kv_cache",
}
CPU_MODULES = {
    "gelu_mul": "cpu_activation",
    "rms_norm": "cpu_norm",
    "rotary_embedding": "cpu_rotary",
    "silu_mul": "cpu_activation",
}
NATIVE = ("paged_attention", "rms_norm", "rotary_embedding", "silu_mul", "store_kv_cache")  # in `cpu_native`


@cache
def choose(operation: str, device: torch.device) -> Choice:
    """The body of an operation that has one in Triton beside the reference, for tensors on ``device``."""
    blocker = triton_blocker(device)
    if blocker is not None and device.type == "cpu":
        return _choose_cpu(operation, device, blocker)
    if blocker is not None:
        return Choice(operation, "reference", blocker, getattr(reference, operation))
    module = importlib.import_module(f"quantkit_kernels.{TRITON_MODULES[operation]}")
    return Choice(operation, "triton", f"tensors are on {device}", getattr(module, operation))


def _choose_cpu(operation: str, device: torch.device, reason: str) -> Choice:
    """The same on a CPU where Triton's does not run for a reason: compiled, of torch's calls, or the reference."""
    if operation in NATIVE:
        no_native = native_blocker()
        if no_native is None:
            return Choice(
                operation, BODY, f"tensors are on {device}, compiled for AVX2", getattr(cpu_native, operation)
            )
        reason = f"tensors are on {device}; {no_native}"
    if operation not in CPU_MODULES:
        return Choice(operation, "reference", reason, getattr(reference, operation))
    module = importlib.import_module(f"quantkit_kernels.{CPU_MODULES[operation]}")
    return Choice(
        operation, "cpu", reason if operation in NATIVE else f"tensors are on {device}", getattr(module, operation)
    )


@cache
def choose_linear(device: torch.device, dtype: torch.dtype) -> Choice:
    """The body of linear for tensors of ``dtype`` on ``device``."""
    if _is_widened(device, dtype):
        return Choice("linear", "cpu widened", f"torch.bfloat16 on a CPU with {describe_cpu()}", widened_linear)
    return Choice("linear", "aten", f"{dtype} on {device.type}", torch.nn.functional.linear)


def activation_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type in which a model of ``dtype`` should keep its activations: float32 where that is what is multiplied."""
    return torch.float32 if _is_widened(device, dtype) else dtype


def _is_widened(device: torch.device, dtype: torch.dtype) -> bool:
    is_for_cpu = device.type == "cpu" and triton_blocker(device) is not None
    return is_for_cpu and dtype == torch.bfloat16 and not has_bfloat16_matmul()


def _crossover_of(device: torch.device) -> Crossover:
    return crossover(torch.cuda.get_device_name(device) if device.type == "cuda" else DEFAULT)


class DenseWeight:
    """A weight as it is, for repeated use; calling it multiplies as `choose_linear` says and adds the bias.

    Args:
        weight: [N, K] floating.
        bias: [N] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        choice = choose_linear(weight.device, weight.dtype)
        self.body, self._function = choice.body, choice.function

    @property
    def nbytes(self) -> int:
        """Bytes that this weight keeps in memory."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N] product of the activations, [..., K], with the weight; in the type of x."""
        product: Tensor = self._function(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)
        return product


def choose_prepacked_linear(weight: Tensor) -> Choice:
    """The body of linear for one dense weight; ``function(weight, bias)`` prepares it."""
    choice = choose_linear(weight.device, weight.dtype)
    if choice.function is not widened_linear:
        return Choice("linear", choice.body, choice.reason, DenseWeight)
    no_native = native_half_blocker(weight)
    if no_native is None:
        return Choice("linear", NativeHalf.body, choice.reason, NativeHalf)
    blocker = cpu_half_blocker(weight)
    if blocker is not None:
        return Choice("linear", choice.body, blocker, DenseWeight)
    return Choice("linear", CpuHalf.body, f"{choice.reason}; {no_native}", CpuHalf)


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


def _blocker(device: torch.device, of_triton: str | None, of_cpu: str | None) -> str | None:
    """Why only the reference takes a weight on ``device``, from the reasons against each body; None if one takes it."""
    no_triton = triton_blocker(device)
    if no_triton is None:
        return of_triton
    return of_cpu if device.type == "cpu" else no_triton


def choose_w4a16_gemm(weight_packed: Tensor, scale: Tensor, group_size: int, dtype: torch.dtype) -> Choice:
    """The body of w4a16_gemm for one weight; ``function(weight_packed, scale, group_size, zero_point)`` prepares it."""
    device = weight_packed.device
    is_triton = triton_blocker(device) is None
    reason = f"{dtype} on a CPU with {describe_cpu()}"
    if not is_triton and device.type == "cpu" and not has_bfloat16_matmul():
        no_native = native_w4a16_blocker(weight_packed)
        if no_native is None:
            return Choice("w4a16_gemm", NativeW4A16.body, reason, NativeW4A16)
        reason = f"{reason}; {no_native}"
    in_features = weight_packed.shape[1] * reference.CODES_PER_WORD
    blocker = _blocker(
        device,
        w4a16_blocker(in_features, group_size, dtype),
        cpu_w4a16_blocker(weight_packed, scale, group_size, dtype),
    )
    if blocker is not None:
        return Choice("w4a16_gemm", "reference", blocker, partial(ReferenceWeight, reference.w4a16_gemm))

    if is_triton:
        from quantkit_kernels.triton_w4a16 import TritonW4A16

        def prepack_triton(words: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> TritonW4A16:
            return TritonW4A16(words, scale, group_size, dtype, zero_point)

        most = _crossover_of(device)
        reason = f"up to {most.w4a16_packed_rows} rows; dequantized for more ({most.source})"
        return Choice("w4a16_gemm", TritonW4A16.body, reason, prepack_triton)

    def prepack(weight_packed: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> CpuW4A16:
        return CpuW4A16(weight_packed, scale, group_size, dtype, zero_point)

    return Choice("w4a16_gemm", CpuW4A16.body, reason, prepack)


def choose_w8a16_gemm(codes: Tensor, dtype: torch.dtype, group_size: int = reference.PER_CHANNEL) -> Choice:
    """The body of w8a16_gemm for one weight; ``function(codes, scale, group_size, zero_point)`` prepares it."""
    device = codes.device
    is_triton = triton_blocker(device) is None
    blocker = _blocker(device, w8a16_blocker(group_size, dtype), cpu_int8_blocker(codes, dtype))
    if blocker is not None:
        return Choice("w8a16_gemm", "reference", blocker, partial(ReferenceWeight, reference.w8a16_gemm))

    if is_triton:
        from quantkit_kernels.triton_w8a16 import TritonW8A16

        def prepack_triton(codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> TritonW8A16:
            return TritonW8A16(codes, scale, group_size, dtype, zero_point)

        most = _crossover_of(device)
        reason = f"up to {most.w8a16_packed_rows} rows; dequantized for more ({most.source})"
        return Choice("w8a16_gemm", TritonW8A16.body, reason, prepack_triton)

    def prepack(codes: Tensor, scale: Tensor, group_size: int, zero_point: Tensor | None) -> CpuW8A16:
        return CpuW8A16(codes, scale, group_size, dtype, zero_point)

    return Choice("w8a16_gemm", CpuW8A16.body, f"{dtype} on a CPU with {describe_cpu()}", prepack)


def choose_w8a8_gemm(codes: Tensor, dtype: torch.dtype) -> Choice:
    """The body of w8a8_gemm for one weight; ``function(codes, scale, input_scale, bias)`` prepares it."""
    blocker = _blocker(codes.device, w8a8_blocker(codes.shape[1]), cpu_int8_blocker(codes, dtype))
    if blocker is not None:
        return Choice("w8a8_gemm", "reference", blocker, partial(ReferenceWeight, reference.w8a8_gemm))
    if triton_blocker(codes.device) is None:
        from quantkit_kernels.triton_w8a8 import TritonW8A8

        def prepack_triton(codes: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None) -> TritonW8A8:
            return TritonW8A8(codes, scale, dtype, input_scale, bias)

        return Choice("w8a8_gemm", TritonW8A8.body, f"tensors are on {codes.device}", prepack_triton)

    def prepack(codes: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None) -> CpuW8A8:
        return CpuW8A8(codes, scale, dtype, input_scale, bias)

    if has_int8_matmul():
        reason = f"{dtype} on a CPU with 8-bit matrix products (VNNI)"
        return Choice("w8a8_gemm", WHOLE_NUMBERS, reason, prepack)
    reason = f"{dtype} on a CPU without 8-bit matrix products (VNNI)"
    no_native = native_w8a8_blocker(codes)
    if no_native is None:
        return Choice("w8a8_gemm", NativeW8A8.body, reason, NativeW8A8)
    return Choice("w8a8_gemm", w8a8_body(codes), f"{reason}; {no_native}", prepack)
