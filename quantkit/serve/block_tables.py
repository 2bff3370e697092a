"""Gives requests their cache blocks: found by their content, shared, copied before they are written, and swapped."""

from quantkit.serve.block_mover import BlockMover
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.preemption import PreemptionCost
from quantkit.serve.prefix_hash import extend_block_hashes
from quantkit.serve.request import Request


class BlockTables:
    """The block tables of all requests.

    Args:
        pool: the blocks.
        enable_prefix_caching: look for the blocks of a prompt among those that are known, and make them known.
        chunk: tokens in a chunk of a prompt, a multiple of the block size, if results must not depend on what is
            cached: then only whole chunks are found and made known. None if chunks may be cut anywhere.
        mover: copies blocks.
        cost: decides whether a preempted request is swapped; None is never.

    Attributes:
        num_queried_tokens: tokens of prompts that were looked for.
        num_hit_tokens: those that were found.
        num_swaps: how often a request was swapped out.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        enable_prefix_caching: bool = False,
        chunk: int | None = None,
        mover: BlockMover | None = None,
        cost: PreemptionCost | None = None,
    ) -> None:
        self._pool = pool
        self._enable_prefix_caching = enable_prefix_caching
        self._chunk = chunk
        self._mover = mover if mover is not None else BlockMover()
        self._cost = cost
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_swaps = 0

    def start(self, request: Request, lookahead: int) -> bool:
        """Give a request without blocks room for all its tokens; what is cached or swapped is computed already.

        Returns:
            False, and nothing is done, if there are not enough blocks.
        """
        hits = [] if request.swapped_blocks else self._find(request)
        need = self._blocks_for(request.num_tokens + lookahead) - len(hits)
        if need > self._pool.num_available - self._pool.num_cached_among(hits):
            return False
        self._pool.share(hits)  # before others are taken, which may be cached ones
        request.block_table, request.num_found_blocks = hits + self._pool.allocate(need), len(hits)
        if request.swapped_blocks:
            self._mover.swap_in(request.swapped_blocks, request.block_table[: len(request.swapped_blocks)])
            request.swapped_blocks = []
        else:
            request.num_computed_tokens = len(hits) * self._pool.kv_block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            if self._enable_prefix_caching:
                self.num_queried_tokens += request.num_tokens
                self.num_hit_tokens += request.num_computed_tokens
        return True

    def _find(self, request: Request) -> list[int]:
        """Blocks that hold the request's first tokens; its last one is computed in any case, for the logits."""
        needs_logits = request.params.prompt_logprobs is not None and request.num_output_tokens == 0
        if not self._enable_prefix_caching or needs_logits:
            return []
        size = self._pool.kv_block_size
        extend_block_hashes(request.block_hashes, request.hash_root, request.token_ids, size)
        hits = self._pool.find(request.block_hashes[: (request.num_tokens - 1) // size])
        if self._chunk is not None:
            blocks_in_chunk = self._chunk // size
            hits = hits[: len(hits) // blocks_in_chunk * blocks_in_chunk]
        return hits

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for the tokens from those computed up to ``num_tokens``, in blocks that nobody else holds.

        Returns:
            False, and nothing is done, if there are not enough blocks.
        """
        table = request.block_table
        first = request.num_computed_tokens // self._pool.kv_block_size
        is_shared = first < len(table) and self._pool.is_shared(table[first])
        need = max(0, self._blocks_for(num_tokens) - len(table))
        if need + is_shared > self._pool.num_available:
            return False
        if is_shared:
            (own,) = self._pool.allocate(1)
            self._mover.copy(table[first], own)
            self._pool.free([table[first]])
            table[first] = own
        table += self._pool.allocate(need)
        return True

    def register(self, request: Request, start: int, stop: int) -> None:
        """Make the blocks known that are full once the tokens from ``start`` to ``stop`` are computed.

        That may be before they are: requests of the same step may share them, because a layer stores all keys and
        values of a step before it reads any. If the step fails they must be forgotten.
        """
        size = self._pool.kv_block_size
        if not self._enable_prefix_caching or start // size == stop // size:
            return
        if self._chunk is not None and (start % self._chunk or stop - start != self._chunk):
            return
        extend_block_hashes(request.block_hashes, request.hash_root, request.token_ids, size)
        for index in range(start // size, stop // size):
            self._pool.register(request.block_table[index], request.block_hashes[index])

    def fork(self, leader: Request, follower: Request) -> None:
        """Let another request start from what one has computed."""
        count = self._pool.blocks_for(leader.num_computed_tokens)
        follower.block_table = leader.block_table[:count]
        self._pool.share(follower.block_table)
        follower.num_computed_tokens = follower.furthest = leader.num_computed_tokens
        follower.block_hashes = list(leader.block_hashes)
        follower.num_cached_tokens = leader.num_cached_tokens

    def suspend(self, request: Request) -> None:
        """Take a request's blocks, so that it can go on later: from a copy, or by computing its tokens anew."""
        computed = request.block_table[: self._pool.blocks_for(request.num_computed_tokens)]
        if self._is_swapped(request, computed):
            request.swapped_blocks = self._mover.swap_out(computed)
            self.num_swaps += 1
        else:
            request.num_computed_tokens = 0
        self._pool.free(request.block_table)
        request.block_table = []

    def _is_swapped(self, request: Request, computed: list[int]) -> bool:
        if self._cost is None or not computed or len(computed) > self._mover.num_free_host_blocks:
            return False
        num_shared = sum(map(self._pool.is_shared, computed)) if self._enable_prefix_caching else 0  # others keep these
        num_tokens = max(0, request.num_computed_tokens - num_shared * self._pool.kv_block_size)
        return self._cost.swap(len(computed)) < self._cost.recompute(num_tokens)

    def release(self, request: Request) -> list[int]:
        """Take everything that a request holds, for good; returns the blocks that are free now."""
        freed = self._pool.free(request.block_table)
        self._mover.drop(request.swapped_blocks)
        request.block_table, request.swapped_blocks = [], []
        return freed

    def forget(self, request: Request, first: int = 0) -> None:
        """Make what a request has in the cache unknown from one of its blocks on, because it may be wrong."""
        self._pool.forget(request.block_table[first:])

    def _blocks_for(self, num_tokens: int) -> int:
        """Blocks to reserve; lookahead must not make a request larger than the cache."""
        return min(self._pool.blocks_for(num_tokens), self._pool.num_usable)
