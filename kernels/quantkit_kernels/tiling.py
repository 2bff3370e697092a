"""How a product is cut into programs; no GPU is asked, so that the same shapes give the same sums everywhere."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

TARGET_PROGRAMS = 256  # about two for each of the 132 multiprocessors of an H200
MAX_SPLITS = 16
MIN_STEPS = 4  # of the loop over columns that a program keeps


@dataclass(frozen=True, slots=True)
class Tiling:
    """The shape of a program's tile, and the launch that goes with it.

    Attributes:
        block_m: rows of the activations.
        block_n: rows of the weight.
        splits: runs into which the columns are cut; each has programs of its own.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int

    @property
    def bytes_per_output(self) -> int:
        """Bytes that the kernel writes for an element of the product: 16 bits, or a float32 for each split."""
        return 2 if self.splits == 1 else 4 * self.splits

    def outputs(
        self, rows: Tensor, out_features: int, part_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """The product, [M, N] in the dtype of rows, and where the kernel writes: there, or parts [splits, M, N]."""
        out = torch.empty(rows.shape[0], out_features, dtype=rows.dtype, device=rows.device)
        if self.splits == 1:
            return out, out
        return out, torch.empty(self.splits, *out.shape, dtype=part_dtype, device=rows.device)


@cache
def generation(device: torch.device) -> int:
    """80 or 90: whose tiles a GPU gets; those of an H200 for a CPU in Triton's interpreter.

    80 is for what multiplies from registers and has about 100 KiB of shared memory: before capability 9.0, and again
    from 12.0 on, the GPUs of workstations. Between them sums lie elsewhere, and there are 227 KiB.
    """
    if device.type != "cuda":
        return 90
    return 90 if (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0) else 80


def choose_splits(tiles: int, steps: int) -> int:
    """Into how many runs the ``steps`` of the loop over columns are cut, a power of two, for a product of ``tiles``."""
    splits = 1
    while splits < MAX_SPLITS and tiles * splits < TARGET_PROGRAMS and steps // (2 * splits) >= MIN_STEPS:
        splits *= 2
    return splits


def rows_of(x: Tensor, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[M, K] the activations with unit stride along K.

    Raises:
        ValueError: another dtype, device or number of columns than the weight was prepared for.
    """
    if x.dtype != dtype or x.shape[-1:] != (in_features,):
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, allowed is {dtype} [..., {in_features}]")
    if x.device != device:
        raise ValueError(f"x is on {x.device}, allowed is the device of the weight, {device}")
    rows = x.reshape(-1, in_features)
    return rows if rows.stride(1) == 1 or in_features == 1 else rows.contiguous()
