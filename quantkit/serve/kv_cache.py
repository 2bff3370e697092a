"""The memory behind the block tables: keys and values of every layer, in blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one layer.

    Attributes:
        num_kv_heads: heads of both.
        head_dim: width of a key.
        value_dim: width of a value.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Numbers in a slot: all heads' keys, then all heads' values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


def kv_block_bytes(shapes: Sequence[KVShape], kv_block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(shape.width for shape in shapes) * kv_block_size * dtype.itemsize


class KVCache:
    """Paged keys and values. A slot's keys and values lie side by side, so that one gather fetches both.

    Args:
        shapes: one a layer.
        num_blocks: blocks, the null block included.
        kv_block_size: slots in a block.
        dtype: of the numbers.

    Attributes:
        num_blocks: as given.
        kv_block_size: as given.
        rows: for each layer [blocks * kv_block_size, width]. Zeros at first: an attention weight of 0 must not meet a
            NaN.
        caches: for each layer its keys [blocks, kv_block_size, H_kv, D] and values [.., D_v], views of the rows.
    """

    def __init__(self, shapes: Sequence[KVShape], num_blocks: int, kv_block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._shapes = tuple(shapes)
        self._blocks = [_lazy_zeros((num_blocks, kv_block_size, shape.width), dtype) for shape in shapes]
        self.rows: tuple[Tensor, ...] = tuple(blocks.flatten(0, 1) for blocks in self._blocks)
        self.caches: tuple[tuple[Tensor, Tensor], ...] = tuple(
            _split(blocks, shape) for blocks, shape in zip(self._blocks, shapes, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(blocks.nbytes for blocks in self._blocks)

    def gather(self, layer: int, block_ids: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences, copied together.

        Args:
            layer: which layer.
            block_ids: [num_seqs * n] int64, n blocks of each sequence.
            num_seqs: sequences.

        Returns:
            [num_seqs, H_kv, n * kv_block_size, D] and [.., D_v].
        """
        rows = self._blocks[layer].index_select(0, block_ids)
        return self._heads_first(layer, rows, num_seqs, len(block_ids) * self.kv_block_size // num_seqs, 0)

    def view(self, layer: int, first_slot: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values of neighbouring slots, not copied: [1, H_kv, num_slots, D] and [.., D_v]."""
        return self._heads_first(layer, self._blocks[layer], 1, num_slots, first_slot * self._shapes[layer].width)

    def _heads_first(
        self, layer: int, rows: Tensor, num_seqs: int, num_keys: int, offset: int
    ) -> tuple[Tensor, Tensor]:
        """Views of the rows of some sequences that lie one behind the other from ``offset`` on; one call for each."""
        shape = self._shapes[layer]
        heads, width = shape.num_kv_heads, shape.width
        first_value = offset + heads * shape.head_dim
        return (
            rows.as_strided(
                (num_seqs, heads, num_keys, shape.head_dim), (num_keys * width, shape.head_dim, width, 1), offset
            ),
            rows.as_strided(
                (num_seqs, heads, num_keys, shape.value_dim), (num_keys * width, shape.value_dim, width, 1), first_value
            ),
        )

    def erase(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero, when they may hold numbers that are none."""
        if block_ids:
            for blocks in self._blocks:
                blocks[torch.tensor(block_ids)] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written: numpy asks for pages that are zero, torch writes to each."""
    return torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, numpy.uint8)).view(dtype).view(shape)


def _split(rows: Tensor, shape: KVShape) -> tuple[Tensor, Tensor]:
    """Views of [..., width] as keys [..., H_kv, D] and values [..., H_kv, D_v]."""
    split = shape.num_kv_heads * shape.head_dim
    keys = rows[..., :split].unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    return keys, rows[..., split:].unflatten(-1, (shape.num_kv_heads, shape.value_dim))
