"""The block types of GGUF, as data: what a code stands for, and how the scales of a block are stored.

A row of K weights is cut into blocks, a block into sub-blocks that each have a scale (and a minimum):

    weight = scale * level(code) - minimum,   scale = d * s,   minimum = dmin * m

d and dmin are float16, s and m small integers. The older types have one sub-block a block and no s and m.

Source: ggml, ggml-common.h (layouts) and ggml-quants.c (their meaning).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from quantkit.errors import UsageError, did_you_mean

NONLINEAR_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS


class Levels:
    """The numbers that a code can stand for.

    Args:
        values: ascending integers; code 0 is the first.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self.low, self.high = float(values[0]), float(values[-1])
        self.peak = max(self.low, self.high, key=abs)
        self.uniform = len(values) == values[-1] - values[0] + 1
        self._table = torch.tensor(values, dtype=torch.float32)
        middles = (self._table[1:] + self._table[:-1]) / 2
        halves = torch.arange(2 * int(self.low), 2 * int(self.high) + 1) / 2
        self._nearest_code = torch.bucketize(halves, middles)  # code by half steps; the middles are half steps too

    def nearest(self, x: Tensor) -> Tensor:
        """The level nearest to each value of ``x`` (which may be overwritten), as float32."""
        if self.uniform:
            return x.round_().clamp_(self.low, self.high)
        return self._table[self._code_of(x)]

    def codes(self, levels: Tensor) -> Tensor:
        """uint8 codes of float32 levels."""
        if self.uniform:
            return (levels - self.low).to(torch.uint8)
        return self._code_of(levels.clone()).to(torch.uint8)

    def _code_of(self, x: Tensor) -> Tensor:
        """Code of the nearest level; ``x`` is overwritten."""
        half_steps = x.clamp_(self.low, self.high).sub_(self.low).mul_(2).round_()
        return self._nearest_code[half_steps.to(torch.int32)]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose blocks hold codes.

    Attributes:
        name: as ggml spells it.
        levels: of the weights' codes.
        sub_block: weights that share a scale.
        sub_blocks: sub-blocks in a block.
        has_minimum: whether a sub-block has a minimum.
        scale_levels: what s and m can be; None if the scale is d itself.
    """

    name: str
    levels: Levels
    sub_block: int = 32
    sub_blocks: int = 1
    has_minimum: bool = False
    scale_levels: Levels | None = None

    @property
    def ggml(self) -> GGMLQuantizationType:
        """The type's number in a file."""
        return GGMLQuantizationType[self.name]

    @property
    def block(self) -> int:
        """Weights of a block."""
        return self.sub_block * self.sub_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(GGML_QUANT_SIZES[self.ggml][1])


SIX_BITS, SIGNED_SIX_BITS = Levels(range(64)), Levels(range(-32, 32))
NONLINEAR = Levels(NONLINEAR_LEVELS)
BLOCK_TYPES: dict[str, BlockType] = {
    block_type.name: block_type
    for block_type in (
        BlockType("Q4_0", Levels(range(-8, 8))),
        BlockType("Q4_1", Levels(range(16)), has_minimum=True),
        BlockType("Q5_0", Levels(range(-16, 16))),
        BlockType("Q5_1", Levels(range(32)), has_minimum=True),
        BlockType("Q8_0", Levels(range(-127, 128))),
        BlockType("Q2_K", Levels(range(4)), 16, 16, has_minimum=True, scale_levels=Levels(range(16))),
        BlockType("Q3_K", Levels(range(-4, 4)), 16, 16, scale_levels=SIGNED_SIX_BITS),
        BlockType("Q4_K", Levels(range(16)), 32, 8, has_minimum=True, scale_levels=SIX_BITS),
        BlockType("Q5_K", Levels(range(32)), 32, 8, has_minimum=True, scale_levels=SIX_BITS),
        BlockType("Q6_K", SIGNED_SIX_BITS, 16, 16, scale_levels=Levels(range(-128, 128))),
        BlockType("IQ4_NL", NONLINEAR),
        BlockType("IQ4_XS", NONLINEAR, 32, 8, scale_levels=SIGNED_SIX_BITS),
    )
}
PLAIN_TYPES = ("F32", "F16", "BF16")
TENSOR_TYPES = (*PLAIN_TYPES, *BLOCK_TYPES)


def bits_per_weight(type_name: str) -> float:
    """Bits of a weight in a type, scales included."""
    if type_name in PLAIN_TYPES:
        return 32.0 if type_name == "F32" else 16.0
    block_type = BLOCK_TYPES[type_name]
    return block_type.block_bytes * 8 / block_type.block


def row_multiple(type_name: str) -> int:
    """The number of which a row's length must be a multiple."""
    return 1 if type_name in PLAIN_TYPES else BLOCK_TYPES[type_name].block


def check_tensor_type(type_name: str) -> str:
    """The name itself.

    Raises:
        UsageError: no such type.
    """
    if type_name not in TENSOR_TYPES:
        choices = f"Choose from {', '.join(TENSOR_TYPES)}{did_you_mean(type_name, tuple(TENSOR_TYPES))}"
        raise UsageError(f"there is no tensor type {type_name!r}", fix=choices)
    return type_name
