"""A case: one operation at one shape, what it must give, what it costs, and what torch does instead."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.launches import BYTES_PER_SECOND, OPS_PER_SECOND, Launch

Result = Tensor | tuple[Tensor, ...]
# Largest error, relative to the largest number of the reference: tests/kernels/conftest.py, and one step of 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.int64: 0.0}
ONE_CODE = 1 / 100


@dataclass(frozen=True)
class Work:
    """A case whose tensors lie on the device.

    Attributes:
        run: the operation, and what is compared of its results.
        reference: the same by `quantkit_kernels.reference`, in pieces that memory holds.
        launch: its bytes and FLOPs.
        timed: the operation alone; None if that is ``run``.
        torch_run: torch's own way to the same; None if it has none.
        tolerance: of the error; None is that of the result's type.
    """

    run: Callable[[], Result]
    reference: Callable[[], Result]
    launch: Launch
    timed: Callable[[], object] | None = None
    torch_run: Callable[[], object] | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Case:
    """An operation at a shape.

    Attributes:
        op: of quantkit_kernels.
        label: the shape in words.
        make: allocates its tensors on a device.
    """

    op: str
    label: str
    make: Callable[[torch.device], Work]


def error_of(found: Result, wanted: Result, tolerance: float | None) -> tuple[float, float]:
    """(largest error relative to the largest number, allowed error) over all results; a NaN is an infinite error."""
    mine_all, other_all = ((result,) if isinstance(result, Tensor) else result for result in (found, wanted))
    worst, allowed = -math.inf, 0.0
    for mine, other in zip(mine_all, other_all, strict=True):
        assert mine.shape == other.shape, f"{list(mine.shape)} instead of {list(other.shape)}"
        limit = TOLERANCE[mine.dtype] if tolerance is None else tolerance
        if mine.dtype == torch.int64:
            error = float((mine != other).float().mean())
        else:
            largest = other.float().abs().max().clamp(min=1e-20)
            error = float(((mine.float() - other.float()).abs().max() / largest).nan_to_num(math.inf))
        if error - limit >= worst - allowed:
            worst, allowed = error, limit
    return worst, allowed


def roofline_seconds(launch: Launch) -> float:
    """Least time on an H200 with tensor cores, also where a few rows are multiplied on other units."""
    kind = "bf16" if launch.op.endswith("a16_gemm") else launch.flop_dtype
    return max(launch.bytes / BYTES_PER_SECOND, launch.flops / OPS_PER_SECOND[kind])


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers, the same on every run."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)
