"""Triton bodies of silu_mul and gelu_mul: one program per piece of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_gated

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """The product of x and its logistic function, of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of x and its normal distribution function, exact or by a hyperbolic tangent, of float32."""
    if TANH:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, columns, stride_x, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + columns + column, mask=mask, other=0.0).to(tl.float32)
    gate = silu(gate) if ACTIVATION == "silu" else gelu(gate, ACTIVATION == "gelu_tanh")
    tl.store(out_ptr + row * columns + column, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def _gated(x: Tensor, activation: str) -> Tensor:
    check_gated(x)
    num_rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, columns), dtype=x.dtype, device=x.device)
    if out.numel():
        with torch.cuda.device(x.device) if x.is_cuda else torch.device("cpu"):
            _gated_kernel[(num_rows, triton.cdiv(columns, BLOCK))](
                x, out, columns, x.stride(0), ACTIVATION=activation, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
    return out


def silu_mul(x: Tensor) -> Tensor:
    """Launch the Triton kernel; argument and result as `quantkit_kernels.reference.silu_mul`.

    Precision: float32, rounded once. Needs: unit stride along the columns; any stride along T.

    Raises:
        ValueError: a shape, type or stride that does not fit.
    """
    return _gated(x, "silu")


def gelu_mul(x: Tensor, tanh: bool) -> Tensor:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.gelu_mul`."""
    return _gated(x, "gelu_tanh" if tanh else "gelu")


def _launch(op: str, label: str, rows: int, columns: int, activation: str) -> Launch:
    constexprs: dict[str, object] = {"ACTIVATION": activation, "BLOCK": BLOCK}
    return Launch(
        op=op,
        label=label,
        kernel=_gated_kernel,
        signature=signature_of(_gated_kernel, {"x_ptr": "*bf16", "out_ptr": "*bf16"}, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=2 * 3 * rows * columns,
        flops=5 * rows * columns,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=("x_ptr", "out_ptr", "columns", "stride_x"),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("silu_mul", "llama-3.1-8b, 2048 tokens", 2048, 14336, "silu"),
    _launch("silu_mul", "smollm2-135m, 32 tokens", 32, 1536, "silu"),
    _launch("gelu_mul", "gemma-3-4b, 2048 tokens, tanh", 2048, 10240, "gelu_tanh"),
    _launch("gelu_mul", "gemma-3-4b, 2048 tokens, erf", 2048, 10240, "gelu"),
)
