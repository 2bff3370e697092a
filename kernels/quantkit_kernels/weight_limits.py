"""Which weights the Triton bodies of the products take; told without importing Triton."""

import torch

from quantkit_kernels.reference import PER_CHANNEL
from quantkit_kernels.w4a16_layout import BLOCK_COLUMNS, STRIP_COLUMNS

MAX_ROW_COLUMNS = 32768  # of a row that a program keeps in its registers, to norm it or to round it to codes


def w4a16_blocker(in_features: int, group_size: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot take a 4-bit weight; None if they can."""
    if in_features % STRIP_COLUMNS:
        return f"K={in_features} is not a multiple of {STRIP_COLUMNS}"
    return w8a16_blocker(group_size, dtype)


def w8a16_blocker(group_size: int, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot take an 8-bit weight, which keeps its layout; None if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations are {dtype}, not torch.bfloat16 or torch.float16"
    if group_size not in (PER_CHANNEL, 32, 64) and group_size % BLOCK_COLUMNS:
        return f"group_size={group_size} is not -1, 32, 64 or a multiple of {BLOCK_COLUMNS}"
    return None


def w8a8_blocker(in_features: int) -> str | None:
    """Why the Triton kernels cannot take an 8-bit weight for 8-bit inputs; None if they can."""
    return f"K={in_features} is more than {MAX_ROW_COLUMNS}" if in_features > MAX_ROW_COLUMNS else None
