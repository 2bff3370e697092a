"""The memory behind the block tables: keys and values of every layer, in blocks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from quantkit_kernels import store_kv_cache
from quantkit_kernels.dispatch import choose
from quantkit_kernels.reference.attention import is_head_dim

CPU = torch.device("cpu")


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


def kv_block_bytes(shapes: Sequence[KVShape], kv_block_size: int, dtype: torch.dtype, *, is_int8: bool = False) -> int:
    """Bytes of one block over all layers; with int8 each head's key and value has a float32 scale beside its codes."""
    if is_int8:
        return sum(shape.width + 2 * shape.num_kv_heads * 4 for shape in shapes) * kv_block_size
    return sum(shape.width for shape in shapes) * kv_block_size * dtype.itemsize


def reads_blocks(shapes: Sequence[KVShape], device: torch.device) -> bool:
    """Whether a kernel of attention reads blocks of such layers where they lie; else they are gathered."""
    is_read = choose("paged_attention", device).body != "reference"
    return is_read and all(is_head_dim(shape.head_dim) and is_head_dim(shape.value_dim) for shape in shapes)


class KVCache:
    """Paged keys and values. A slot's keys and values lie side by side, so that one gather fetches both.

    Args:
        shapes: one a layer.
        num_blocks: blocks, the null block included.
        kv_block_size: slots in a block.
        dtype: of keys and values in attention.
        is_int8: keep them as 8-bit codes, with a scale for each token and head.
        device: where they lie.

    Attributes:
        num_blocks: as given.
        kv_block_size: as given.
        dtype: as given.
        device: as given.
        reads_blocks: there is a kernel of attention that reads blocks where they lie.
        rows: for each layer [blocks * kv_block_size, width]. Zeros at first: an attention weight of 0 must not meet a
            NaN.
        caches: for each layer its keys [blocks, kv_block_size, H_kv, D] and values [.., D_v], views of the rows.
        scales: for each layer the scales of keys and values, both [blocks, kv_block_size, H_kv] float32; empty
            without int8.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        *,
        is_int8: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._shapes = tuple(shapes)
        self.dtype = dtype
        stored = torch.int8 if is_int8 else dtype
        self._blocks = [_zeros((num_blocks, kv_block_size, shape.width), stored, device) for shape in shapes]
        self.rows: tuple[Tensor, ...] = tuple(blocks.flatten(0, 1) for blocks in self._blocks)
        self.caches: tuple[tuple[Tensor, Tensor], ...] = tuple(
            _split(blocks, shape) for blocks, shape in zip(self._blocks, shapes, strict=True)
        )
        self.reads_blocks = reads_blocks(shapes, device)
        self._slots = [(key.flatten(0, 1), value.flatten(0, 1)) for key, value in self.caches]
        sizes = [(num_blocks, kv_block_size, shape.num_kv_heads) for shape in shapes] if is_int8 else []
        self.scales = tuple(
            (_zeros(size, torch.float32, device), _zeros(size, torch.float32, device)) for size in sizes
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(blocks.nbytes for blocks in self._blocks) + sum(k.nbytes + v.nbytes for k, v in self.scales)

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write the keys [T, H_kv, D] and values [T, H_kv, D_v] of new tokens into their slots; -1 is no slot."""
        key_scale, value_scale = self.scales[layer] if self.scales else (None, None)
        store_kv_cache(key, value, *self.caches[layer], slot_mapping, key_scale, value_scale)

    def store_unpadded(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """As `store`, where every token has a slot: a fifth of the calls of torch."""
        if self.scales or self.reads_blocks:
            return self.store(layer, key, value, slot_mapping)
        key_rows, value_rows = self._slots[layer]
        key_rows.index_copy_(0, slot_mapping, key)
        value_rows.index_copy_(0, slot_mapping, value)

    def gather(
        self, layer: int, block_ids: Tensor, num_seqs: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences, copied together.

        Args:
            layer: which layer.
            block_ids: [num_seqs * n] int64, n blocks of each sequence.
            num_seqs: sequences.
            dtype: of the copies; None is that of the cache.

        Returns:
            [num_seqs, H_kv, n * kv_block_size, D] and [.., D_v].
        """
        rows = self._blocks[layer].index_select(0, block_ids)
        if self.scales:
            key_scale, value_scale = (scale.index_select(0, block_ids) for scale in self.scales[layer])
            return self._dequantized(layer, rows, key_scale, value_scale, num_seqs)
        rows = rows if dtype is None else rows.to(dtype)
        return self._heads_first(layer, rows, num_seqs, len(block_ids) * self.kv_block_size // num_seqs, 0)

    def view(self, layer: int, first_slot: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values of neighbouring slots, [1, H_kv, num_slots, D] and [.., D_v]; only codes are copied."""
        if self.scales:
            slots = slice(first_slot, first_slot + num_slots)
            key_scale, value_scale = (scale.flatten(0, 1)[slots] for scale in self.scales[layer])
            return self._dequantized(layer, self.rows[layer][slots], key_scale, value_scale, 1)
        return self._heads_first(layer, self._blocks[layer], 1, num_slots, first_slot * self._shapes[layer].width)

    def _dequantized(
        self, layer: int, rows: Tensor, key_scale: Tensor, value_scale: Tensor, num_seqs: int
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales of slots in any leading shape -> [num_seqs, H_kv, num_keys, D] and [.., D_v]."""
        key, value = _split(rows, self._shapes[layer])
        return self._dequantize(key, key_scale, num_seqs), self._dequantize(value, value_scale, num_seqs)

    def _dequantize(self, codes: Tensor, scale: Tensor, num_seqs: int) -> Tensor:
        numbers = (codes * scale.unsqueeze(-1)).to(self.dtype)
        return numbers.view(num_seqs, -1, *codes.shape[-2:]).transpose(1, 2)

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

    def copy_to(self, target: "KVCache", source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        """Copy blocks to those of another cache of the same kind, or of this one."""
        source_ids, target_ids = torch.tensor(source_blocks), torch.tensor(target_blocks)
        for source, other in zip(self._tensors(), target._tensors(), strict=True):
            other[target_ids] = source[source_ids].to(other.device)

    def erase(self, block_ids: Sequence[int]) -> None:
        """Set blocks to zero, when they may hold numbers that are none."""
        if block_ids:
            for blocks in self._tensors():
                blocks[torch.tensor(block_ids)] = 0

    def _tensors(self) -> list[Tensor]:
        """All there is, each with the blocks first."""
        return [*self._blocks, *(scale for pair in self.scales for scale in pair)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the host they take memory only where they are written: numpy asks for pages that are zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, numpy.uint8)).view(dtype).view(shape)


def _split(rows: Tensor, shape: KVShape) -> tuple[Tensor, Tensor]:
    """Views of [..., width] as keys [..., H_kv, D] and values [..., H_kv, D_v]."""
    split = shape.num_kv_heads * shape.head_dim
    keys = rows[..., :split].unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    return keys, rows[..., split:].unflatten(-1, (shape.num_kv_heads, shape.value_dim))
