"""The numbers of a step on its device, laid out in one piece of memory, so that one copy brings them there."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from quantkit.serve.batch import PADDING_SLOT, Batch

ALIGNMENT = 4  # 32-bit numbers: where a part begins is a multiple of 16 bytes, so that kernels are not compiled anew
TABLE_ALIGNMENT = 16  # blocks: likewise for the rows of block tables


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large the inputs of a step are.

    Attributes:
        num_decodes: requests with one token; they come first.
        decode_context_len: no such request has more tokens.
        num_chunks: other requests.
        num_chunk_tokens: tokens of all of them.
        chunk_len: none has more tokens in the step.
        chunk_context_len: none has more tokens in all.
        num_rows: tokens whose logits are wanted; None for all.
        kv_block_size: tokens in a block of the cache.
    """

    num_decodes: int
    decode_context_len: int
    num_chunks: int
    num_chunk_tokens: int
    chunk_len: int
    chunk_context_len: int
    num_rows: int | None
    kv_block_size: int

    @classmethod
    def of(cls, batch: Batch, kv_block_size: int, num_rows: int | None) -> "StepShape":
        """The shape of a batch as it is."""
        decodes, lens = batch.num_decodes, batch.context_lens
        chunks = [stop - start for start, stop in pairwise(batch.cu_seqlens[decodes:])]
        return cls(
            num_decodes=decodes,
            decode_context_len=max(lens[:decodes], default=0),
            num_chunks=len(chunks),
            num_chunk_tokens=sum(chunks),
            chunk_len=max(chunks, default=0),
            chunk_context_len=max(lens[decodes:], default=0),
            num_rows=num_rows,
            kv_block_size=kv_block_size,
        )

    def table_width(self, context_len: int) -> int:
        """Columns of the block tables of requests of at most ``context_len`` tokens."""
        blocks = -(-context_len // self.kv_block_size)
        return -(-blocks // TABLE_ALIGNMENT) * TABLE_ALIGNMENT

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> type and shape of everything in the memory of a step; the wider type first."""
        tokens = self.num_decodes + self.num_chunk_tokens
        return {
            "input_ids": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "slot_mapping": (torch.int64, (tokens,)),
            "rows": (torch.int64, (self.num_rows or 0,)),
            "decode_tables": (torch.int32, (self.num_decodes, self.table_width(self.decode_context_len))),
            "decode_starts": (torch.int32, (self.num_decodes + 1,)),
            "decode_lens": (torch.int32, (self.num_decodes,)),
            "chunk_tables": (torch.int32, (self.num_chunks, self.table_width(self.chunk_context_len))),
            "chunk_starts": (torch.int32, (self.num_chunks + 1,)),
            "chunk_lens": (torch.int32, (self.num_chunks,)),
        }


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Requests whose attention is one call; the arguments of `quantkit_kernels.paged_attention`."""

    num_tokens: int
    block_tables: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int


class StepInputs:
    """The inputs of steps of one shape; filling them again does not move them.

    Args:
        shape: how large they are.
        device: where they lie.

    Attributes:
        shape: as given.
        input_ids: [T] int64.
        positions: [T] int64.
        slot_mapping: [T] int64.
        rows: [R] int64 tokens whose logits are wanted; None for all.
        groups: the decoding requests and the chunks, if there are any, in the order of their tokens.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape = shape
        self._parts = shape.parts()
        length = sum(_length(*part) for part in self._parts.values())
        self._memory = torch.zeros(length, dtype=torch.int32, device=device)
        views = self._views(self._memory)
        self.input_ids, self.positions = views["input_ids"], views["positions"]
        self.slot_mapping = views["slot_mapping"]
        self.rows = None if shape.num_rows is None else views["rows"]
        decodes = SequenceGroup(
            shape.num_decodes, views["decode_tables"], views["decode_starts"], views["decode_lens"],
            1, shape.decode_context_len,
        )  # fmt: skip
        chunks = SequenceGroup(
            shape.num_chunk_tokens, views["chunk_tables"], views["chunk_starts"], views["chunk_lens"],
            shape.chunk_len, shape.chunk_context_len,
        )  # fmt: skip
        self.groups = tuple(group for group in (decodes, chunks) if group.num_tokens)

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, (dtype, shape) in self._parts.items():
            count = prod(shape) * (dtype.itemsize // 4)
            views[name] = memory[start : start + count].view(dtype).view(shape)
            start += _length(dtype, shape)
        return views

    def fill(self, batch: Batch, rows: Tensor | None = None) -> None:
        """Bring a batch to the device; what a decoding batch has less than the shape is filled up with padding.

        A padding row has the slot -1 and no context: it stores nothing and sees nothing.

        Args:
            batch: as many chunks as the shape has, and at most as many decoding requests.
            rows: [R] int64; None for an input whose rows are all.
        """
        shape, decodes = self.shape, batch.num_decodes
        num_padding = shape.num_decodes - decodes
        assert num_padding == 0 or (num_padding > 0 and not shape.num_chunks), "padding goes behind decodes"
        memory = torch.zeros(self._memory.shape, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        views = self._views(memory)
        count = batch.num_tokens
        views["input_ids"][:count] = batch.input_ids
        views["positions"][:count] = batch.positions
        views["slot_mapping"][:count] = batch.slot_mapping
        views["slot_mapping"][count:] = PADDING_SLOT
        if rows is not None:
            views["rows"][: len(rows)] = rows
        starts = torch.tensor(batch.cu_seqlens, dtype=torch.int32)
        lens = torch.tensor(batch.context_lens, dtype=torch.int32)
        views["decode_starts"].copy_(torch.arange(shape.num_decodes + 1))
        views["chunk_starts"].copy_(starts[decodes:] - decodes)
        for name, own in (("decode", slice(None, decodes)), ("chunk", slice(decodes, None))):
            tables = batch.block_tables[own]
            width = min(tables.shape[1], views[f"{name}_tables"].shape[1])
            views[f"{name}_tables"][: len(tables), :width] = tables[:, :width]
            views[f"{name}_lens"][: len(tables)] = lens[own]
        self._memory.copy_(memory, non_blocking=True)  # pinned memory is not used again before the copy is done


def _length(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """32-bit numbers that a part takes, the gap behind it included."""
    return -(-prod(shape) * dtype.itemsize // (4 * ALIGNMENT)) * ALIGNMENT
