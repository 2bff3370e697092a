"""One step as tensors: the tokens of all requests in one row, and where each belongs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quantkit.serve.block_pool import NULL_BLOCK
from quantkit.serve.request import Request
from quantkit.serve.scheduler import Scheduled

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model computes in one step, for S requests with T tokens together.

    Requests with one token come first, by the length of their context, so that those of similar length lie side by
    side; then the chunks.

    Attributes:
        requests: the S requests, in the order of the tokens.
        input_ids: [T] int64.
        positions: [T] int64, place of each token in its request.
        slot_mapping: [T] int64, slot of the cache for each token's key and value; -1 stores nothing.
        block_tables: [S, B] int64 cache blocks of each request, padded with the null block.
        cu_seqlens: [S + 1] where each request's tokens start in the row, and T.
        context_lens: [S] tokens that each request's last token sees, itself included.
        num_decodes: so many requests, the first ones, have one token.
        sampled_rows: the requests, by number, whose last token is in the step.
        scored_tokens: (request by number, first token, how many) of prompts, in the row of tokens, whose logits are
            asked for as well.
        has_fixed_shapes: True if attention must not depend on where blocks lie.
    """

    requests: tuple[Request, ...]
    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    cu_seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_decodes: int
    sampled_rows: tuple[int, ...]
    scored_tokens: tuple[tuple[int, int, int], ...] = ()
    has_fixed_shapes: bool = False

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.cu_seqlens[-1]

    def logits_indices(self) -> Tensor:
        """[R + P] int64, places in the row of tokens: the last one of each request that is sampled, then the scored."""
        last = [self.cu_seqlens[row + 1] - 1 for row in self.sampled_rows]
        scored = [place for _, first, count in self.scored_tokens for place in range(first, first + count)]
        return torch.tensor(last + scored, dtype=torch.int64)


def build_batch(step: Sequence[Scheduled], kv_block_size: int, *, has_fixed_shapes: bool = False) -> Batch:
    """Lay out a step of at least one request."""
    ordered = sorted(step, key=lambda part: (part.num_tokens > 1, part.start + part.num_tokens))
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens = [0]
    for part in ordered:
        stop = part.start + part.num_tokens
        input_ids += part.request.token_ids[part.start : stop]
        positions += range(part.start, stop)
        table = part.request.block_table
        slots += [table[i // kv_block_size] * kv_block_size + i % kv_block_size for i in range(part.start, stop)]
        cu_seqlens.append(len(input_ids))
    width = max(len(part.request.block_table) for part in ordered)
    tables = [part.request.block_table for part in ordered]
    block_tables = torch.tensor([table + [NULL_BLOCK] * (width - len(table)) for table in tables], dtype=torch.int64)
    return Batch(
        requests=tuple(part.request for part in ordered),
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_tables=block_tables,
        cu_seqlens=tuple(cu_seqlens),
        context_lens=tuple(part.start + part.num_tokens for part in ordered),
        num_decodes=sum(part.num_tokens == 1 for part in ordered),
        sampled_rows=tuple(index for index, part in enumerate(ordered) if part.is_sampled),
        scored_tokens=tuple(
            (index, cu_seqlens[index], part.num_scored) for index, part in enumerate(ordered) if part.num_scored
        ),
        has_fixed_shapes=has_fixed_shapes,
    )


def uncached_batch(sequences: Sequence[Sequence[int]]) -> Batch:
    """Whole sequences of at least one token, each from its start, that leave nothing in the cache."""
    lengths = [len(sequence) for sequence in sequences]
    return Batch(
        requests=(),
        input_ids=torch.tensor([token_id for sequence in sequences for token_id in sequence], dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        slot_mapping=torch.full((sum(lengths),), PADDING_SLOT, dtype=torch.int64),
        block_tables=torch.full((len(lengths), 1), NULL_BLOCK, dtype=torch.int64),
        cu_seqlens=(0, *accumulate(lengths)),
        context_lens=tuple(lengths),
        num_decodes=0,
        sampled_rows=(),
    )
