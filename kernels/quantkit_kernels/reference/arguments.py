"""What an argument of an operation may be, said in one sentence when it is something else."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def check_argument(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
) -> None:
    """Raise ValueError, with the allowed values, unless a tensor has the type, shape, stride and device.

    Args:
        name: of the argument.
        tensor: the argument.
        dtypes: allowed types.
        shape: a number where only that one is allowed, a name where any is.
        device: where the tensor must lie; None is anywhere.

    Raises:
        ValueError: it has not, or its elements do not lie side by side along the last dimension.
    """
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or wanted == found for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, "
            f"allowed is {' or '.join(map(str, dtypes))} [{', '.join(map(str, shape))}]"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has the stride {tensor.stride(-1)} along its last dimension, allowed is 1")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, allowed is the device of the first argument, {device}")
