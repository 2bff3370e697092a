"""The grid of a quantized tensor: the scales of its blocks as they are stored, and what a reader makes of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.gguf.block_types import BlockType


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales of R rows of B blocks with S sub-blocks each.

    Attributes:
        d: [R, B] float32 that float16 holds exactly.
        s: [R, B, S] float32 integers; None if the scale is d itself.
        dmin: [R, B] as d; None if the type has no minimum.
        m: [R, B, S] as s; None without minimum, or if the minimum is dmin itself.
    """

    d: Tensor
    s: Tensor | None = None
    dmin: Tensor | None = None
    m: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """[R, B * S] float32, as a reader multiplies it out."""
        return (self.d if self.s is None else self.d.unsqueeze(-1) * self.s).flatten(1)

    @property
    def minimum(self) -> Tensor | None:
        """[R, B * S] float32 that a reader subtracts."""
        if self.dmin is None:
            return None
        return (self.dmin if self.m is None else self.dmin.unsqueeze(-1) * self.m).flatten(1)

    def rows(self, rows: slice) -> "Grid":
        """The grid of some of the rows."""
        parts = (None if part is None else part[rows] for part in (self.d, self.s, self.dmin, self.m))
        return Grid(*parts)  # type: ignore[arg-type]

    @staticmethod
    def join(grids: "list[Grid]") -> "Grid":
        """The grids of consecutive rows as one."""
        columns = zip(*((grid.d, grid.s, grid.dmin, grid.m) for grid in grids), strict=True)
        return Grid(*(None if parts[0] is None else torch.cat(parts) for parts in columns))  # type: ignore[arg-type]


def dequantize(levels: Tensor, grid: Grid, block_type: BlockType) -> Tensor:
    """[R, K] float32 weights of [R, K] levels, to the bit what a reader computes."""
    grouped = levels.unflatten(1, (-1, block_type.sub_block)) * grid.scale.unsqueeze(-1)
    minimum = grid.minimum
    if minimum is not None:
        grouped -= minimum.unsqueeze(-1)
    return grouped.flatten(1)


def nearest_levels(weight: Tensor, grid: Grid, block_type: BlockType) -> Tensor:
    """[R, K] float32 levels nearest to [R, K] weights on a grid."""
    grouped = weight.unflatten(1, (-1, block_type.sub_block))
    minimum = grid.minimum
    if minimum is not None:
        grouped = grouped + minimum.unsqueeze(-1)
    return block_type.levels.nearest(grouped * safe_inverse(grid.scale).unsqueeze(-1)).flatten(1)


def safe_inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, 1 / torch.where(scale == 0, 1.0, scale))


def to_half(value: Tensor) -> Tensor:
    """float32 rounded to what float16 can hold."""
    return value.to(torch.float16).float()
