"""What attention needs to know about a step, worked out once for all layers: who attends to which blocks, and masks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantkit.serve.batch import Batch
from quantkit.serve.kv_cache import KVCache

MAX_PADDING = 1.3  # in a bucket the longest context is at most so much longer than the shortest, plus one block
BUCKET_BYTES = 1 << 20  # keys and values gathered at a time should stay in the second-level caches


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Which keys some requests attend to, under one sliding window.

    Attributes:
        num_seqs: requests.
        block_ids: [num_seqs * n] int64, blocks to gather; None if the slots are neighbours and need no copy.
        first_slot: the first of the neighbouring slots.
        num_keys: keys of each request in the range, those that are masked included.
        mask: to be added to the scores, 0 or a very negative number; None if every key is seen by every query.
    """

    num_seqs: int
    block_ids: Tensor | None
    first_slot: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Sequences:
    """Requests with one query each, for `quantkit_kernels.paged_attention`; all tensors int32."""

    block_tables: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    max_context_len: int


class Span:
    """Requests whose attention is computed in one call: a bucket of decoding ones, or the chunk of one prompt.

    Args:
        start: first token of the span in the row of tokens.
        stop: end of it.
        block_tables: [n, B] of its requests.
        context_lens: tokens that the last query of each request sees.
        kv_block_size: tokens in a block.
        dtype: of the masks.
        has_fixed_shapes: True if neighbouring slots must not be treated otherwise than scattered ones.

    Attributes:
        start: as given.
        stop: as given.
        num_queries: tokens of each request.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        block_tables: Tensor,
        context_lens: tuple[int, ...],
        kv_block_size: int,
        dtype: torch.dtype,
        has_fixed_shapes: bool = False,
    ) -> None:
        self.start = start
        self.stop = stop
        self.num_queries = (stop - start) // len(context_lens)
        self._block_tables = block_tables
        self._context_lens = context_lens
        self._kv_block_size = kv_block_size
        self._dtype = dtype
        self._has_fixed_shapes = has_fixed_shapes
        self._ranges: dict[int | None, KeyRange] = {}
        self._whole_masks: dict[int | None, Tensor] = {}

    @property
    def is_whole(self) -> bool:
        """True if the span is one request from its first token on: its keys are all in the step itself."""
        return len(self._context_lens) == 1 and self._context_lens[0] == self.num_queries

    @cached_property
    def sequences(self) -> Sequences:
        """The same as a kernel wants it that reads blocks where they lie."""
        lens = torch.tensor(self._context_lens, dtype=torch.int32)
        starts = torch.arange(len(lens) + 1, dtype=torch.int32)
        return Sequences(self._block_tables.int(), starts, lens, max(self._context_lens))

    def key_range(self, window: int | None) -> KeyRange:
        """The keys under a sliding window (None: all); computed once and kept for the other layers."""
        if window not in self._ranges:
            self._ranges[window] = self._make_range(window)
        return self._ranges[window]

    def whole_mask(self, window: int | None) -> Tensor:
        """[1, 1, num_queries, num_queries] for a span that is whole, computed once."""
        if window not in self._whole_masks:
            places = torch.arange(self.num_queries)
            mask = additive_mask(places.unsqueeze(1), places, window, self._dtype)
            self._whole_masks[window] = mask.view(1, 1, *mask.shape)
        return self._whole_masks[window]

    def _make_range(self, window: int | None) -> KeyRange:
        size = self._kv_block_size
        lens = torch.tensor(self._context_lens)
        # The first query of a request stands at lens - num_queries; its window begins window - 1 before.
        begins = lens - self.num_queries + 1 - window if window is not None else torch.zeros_like(lens)
        first_blocks = begins.clamp(min=0) // size
        num_blocks = -(-lens // size) - first_blocks
        if len(self._context_lens) == 1 and not self._has_fixed_shapes:
            table = self._block_tables[0, int(first_blocks) : int(first_blocks + num_blocks)]
            if bool((table.diff() == 1).all()):
                return self._neighbours(window, int(table[0]) * size, int(first_blocks) * size)
        columns = first_blocks.unsqueeze(1) + torch.arange(int(num_blocks.max()))
        inside = columns < self._block_tables.shape[1]
        ids = self._block_tables.gather(1, columns.clamp(max=self._block_tables.shape[1] - 1)) * inside
        mask = self._mask(lens, first_blocks * size, ids.shape[1] * size, window)
        return KeyRange(len(lens), ids.flatten(), 0, ids.shape[1] * size, mask)

    def _neighbours(self, window: int | None, first_slot: int, first_key: int) -> KeyRange:
        """One request whose slots are neighbours: exactly the keys that somebody sees, and often no mask."""
        (length,) = self._context_lens
        if window is not None:
            skipped = max(0, length - self.num_queries + 1 - window) - first_key
            first_slot, first_key = first_slot + skipped, first_key + skipped
        num_keys = length - first_key
        mask = None
        if self.num_queries > 1:
            mask = self._mask(torch.tensor([length]), torch.tensor([first_key]), num_keys, window)
        return KeyRange(1, None, first_slot, num_keys, mask)

    def _mask(self, lens: Tensor, first_keys: Tensor, num_keys: int, window: int | None) -> Tensor:
        """[n, 1, num_queries, num_keys]: each query sees the keys up to its own place, and not before its window."""
        queries = (lens - self.num_queries).view(-1, 1, 1, 1) + torch.arange(self.num_queries).view(1, 1, -1, 1)
        keys = first_keys.view(-1, 1, 1, 1) + torch.arange(num_keys).view(1, 1, 1, -1)
        return additive_mask(queries, keys, window, self._dtype)


def is_visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a query at one place sees a key at another: not later, and fewer than ``window`` places earlier."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def additive_mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query sees the key; elsewhere the least finite number, since -inf alone in a tile makes NaN."""
    visible = is_visible(queries, keys, window)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


class AttentionMetadata:
    """A step's attention: the spans of its batch, and the cache.

    Args:
        batch: the step.
        cache: None if nothing is cached and every request is whole.
        dtype: of the queries.

    Attributes:
        slot_mapping: see `Batch`.
        cache: as given.
        spans: in the order of the tokens, all of them.
    """

    def __init__(self, batch: Batch, cache: KVCache | None, dtype: torch.dtype) -> None:
        self.slot_mapping = batch.slot_mapping
        self.cache = cache
        self.spans: list[Span] = []
        block_size = 1 if cache is None else cache.kv_block_size
        reads_blocks = cache is not None and cache.reads_blocks
        if reads_blocks:
            edges = [batch.num_decodes] if batch.num_decodes else []
        else:
            slot_bytes = 0 if cache is None else max(rows.shape[1] for rows in cache.rows) * cache.dtype.itemsize
            edges = bucket_edges(batch.context_lens[: batch.num_decodes], block_size, slot_bytes)
        edges += range(batch.num_decodes + 1, len(batch.context_lens) + 1)
        for first, last in zip([0, *edges], edges, strict=False):
            start, stop = batch.cu_seqlens[first], batch.cu_seqlens[last]
            tables, lens = batch.block_tables[first:last], batch.context_lens[first:last]
            # One query each: attention is in the type of the keys, see `quantkit.serve.attention`.
            mask_dtype = cache.dtype if cache is not None and stop - start == last - first else dtype
            self.spans.append(Span(start, stop, tables, lens, block_size, mask_dtype, batch.has_fixed_shapes))


def bucket_edges(context_lens: tuple[int, ...], block_size: int, slot_bytes: int) -> list[int]:
    """Cut ascending context lengths into buckets, none padded much and none too large: the end of each."""
    edges: list[int] = []
    first = 0
    for index, length in enumerate(context_lens):
        if index == first:
            continue
        is_long = length > context_lens[first] * MAX_PADDING + block_size
        if is_long or (index + 1 - first) * length * slot_bytes > BUCKET_BYTES:
            edges.append(index)
            first = index
    return [*edges, len(context_lens)] if context_lens else []
