"""Which blocks of the key/value cache are in use: reference counts and a free list. It holds numbers, no tensors."""

from collections.abc import Iterable

NULL_BLOCK = 0  # stands where a block table is padded; never given out


class BlockPool:
    """Hands out cache blocks by number.

    Block 0 is reserved, so that padded entries of a block table point to memory that exists. A block that is given
    back is the next to be given out, and the blocks of one request come back in its order, so a lone request keeps
    getting neighbours.

    Args:
        num_blocks: blocks in the cache, the null block included; at least 2.
        kv_block_size: tokens in a block.

    Attributes:
        num_blocks: as given.
        kv_block_size: as given.
    """

    def __init__(self, num_blocks: int, kv_block_size: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the last one is next
        self._ref_counts = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be had now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_usable - self.num_free - self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds but that are kept for their content; there is no prefix cache yet."""
        return 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.kv_block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference; the caller has made sure that there are enough."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are in use."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is not in use"
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference of each; returns those that are free now."""
        freed: list[int] = []
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is not in use"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                freed.append(block)
        self._free.extend(reversed(freed))
        return freed

    def check_integrity(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise AssertionError unless the books balance: a bug of ours, looked for in tests.

        Args:
            block_tables: all block tables there are; then each block's references are counted against them.
        """
        assert self.num_free + self.num_used + self.num_cached == self.num_usable
        assert NULL_BLOCK not in self._free, "the null block is in the free list"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is in use"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        free = set(self._free)
        for block in range(1, self.num_blocks):
            assert (self._ref_counts[block] == 0) == (block in free), f"block {block} is neither free nor in use"
            assert self._ref_counts[block] >= 0, f"block {block} has a negative reference count"
        if block_tables is not None:
            held = [0] * self.num_blocks
            for table in block_tables:
                for block in table:
                    held[block] += 1
            assert held == self._ref_counts, "the block tables and the reference counts disagree"
