"""What compiled bodies ask of tensors: they are given addresses, and read whatever lies there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import check_argument


def pointer(tensor: Tensor | None) -> int | None:
    """Where the numbers of a tensor lie; None for none."""
    return None if tensor is None else tensor.data_ptr()


def is_readable(tensor: Tensor) -> bool:
    """Whether rows can be read: on the CPU, numbers side by side, and no gradient is asked for."""
    return (
        tensor.is_cpu
        and tensor.dim() > 0
        and (tensor.stride(-1) == 1 or tensor.shape[-1] < 2)
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


def check_readable(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not on the CPU, or of which a gradient is asked: bodies give none."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_cpu:
            raise ValueError(f"{name} is on {tensor.device}, allowed is cpu, whose memory compiled bodies read")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which compiled bodies do not give: call them under "
                             "torch.no_grad(), or the operation of quantkit_kernels.reference")  # fmt: skip


def check_dense(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | str]) -> None:
    """Raise ValueError, with the allowed values, unless a tensor has the type and shape and can be read as one run."""
    check_argument(name, tensor, (dtype,), shape)
    check_readable(**{name: tensor})
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has the strides {tensor.stride()}, allowed is a contiguous tensor")
