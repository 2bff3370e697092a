"""The layout of a 4-bit weight for the Triton kernels: made from a checkpoint's layout once at load, never saved.

The columns of a weight [N, K] are cut into blocks of 128, a block into four strips of 32. A 16-bit word holds one code
of each strip, so that shifting one tile of words gives four tiles of codes, each of which meets 32 neighbouring columns
of the activations; no code changes its place in a register, and a strip lies in one group, for groups of 32 and more.

    words [ceil(K / 128), N, 32] int16:  the code of row n and column k = 128 b + 32 i + j, with 8 added (0 to 15), lies
                                         in bits 4 i to 4 i + 3 of words[b, n, j]
    scale [G, N] in the checkpoint's dtype, zero_point [G, N] int8: transposed, rows of a tile side by side

The rows of a tile are contiguous in memory: 64 bytes each, four loads of 128 bits. Columns past K hold the code 0; the
kernels read zeros for their activations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels.reference import PER_CHANNEL, unpack_int4

BLOCK_COLUMNS = 128  # columns in a block
STRIP_COLUMNS = 32  # columns in a strip: one nibble of a word
STRIPS = BLOCK_COLUMNS // STRIP_COLUMNS


def groups_per_block(group_size: int) -> int:
    """Groups in a block of columns: 4, 2, or 1 where a group has whole blocks; 0 where a row is one group."""
    return 0 if group_size == PER_CHANNEL else max(1, BLOCK_COLUMNS // group_size)


def to_words(weight_packed: Tensor) -> Tensor:
    """[ceil(K / 128), N, 32] int16 words from [N, K / 8] int32, see `quantkit_kernels.reference.unpack_int4`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    out_features, in_features = weight_packed.shape[0], weight_packed.shape[1] * 8
    if in_features % STRIP_COLUMNS:
        raise ValueError(f"K={in_features}, allowed is a multiple of {STRIP_COLUMNS}")
    codes = unpack_int4(weight_packed).add_(8).to(torch.int32)
    codes = F.pad(codes, (0, -in_features % BLOCK_COLUMNS)).view(out_features, -1, STRIPS, STRIP_COLUMNS)
    shifts = torch.arange(0, 4 * STRIPS, 4, dtype=torch.int32, device=codes.device).view(1, 1, STRIPS, 1)
    return (codes << shifts).sum(dim=2, dtype=torch.int32).to(torch.int16).transpose(0, 1).contiguous()


def from_words(words: Tensor, in_features: int) -> Tensor:
    """[N, K] int8 signed codes in [-8, 7]; the opposite of `to_words`."""
    shifts = torch.arange(0, 4 * STRIPS, 4, dtype=torch.int32, device=words.device).view(1, 1, STRIPS, 1)
    codes = (words.to(torch.int32).unsqueeze(2) >> shifts) & 15  # [blocks, N, 4, 32]
    return codes.sub_(8).to(torch.int8).transpose(0, 1).flatten(1)[:, :in_features]
