"""Which blocks of the key/value cache are in use, and what is in those that are not. It holds numbers, no tensors."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0  # stands where a block table is padded; never given out


class BlockPool:
    """Hands out cache blocks by number, and finds blocks by the hash of their content.

    A block is used (some request holds it), cached (nobody holds it, its content is kept in case it is asked for) or
    free. Block 0 is reserved, so that padded entries of a block table point to memory that exists. A free block that is
    given back is the next to be given out, and the blocks of one request come back in its order, so a lone request
    keeps getting neighbours. When none is free, the cached block that was given back first is taken; of one request
    the last block goes first, since those before it are of use without it.

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
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order in which they were given back

    @property
    def num_usable(self) -> int:
        """Blocks that requests can have: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that have no content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but that are kept for their content."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_usable - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.kv_block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one reference; the caller has made sure that there are enough."""
        assert 0 <= count <= self.num_available, f"{count} blocks asked for, {self.num_available} are available"
        blocks = []
        for _ in range(count):
            if not self._free:
                self._evict(next(iter(self._cached)))
            block = self._free.pop()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are used or cached."""
        for block in blocks:
            assert self._ref_counts[block] > 0 or block in self._cached, f"block {block} is not in use"
            self._cached.pop(block, None)
            self._ref_counts[block] += 1

    def is_shared(self, block: int) -> bool:
        """True if more than one request holds the block."""
        return self._ref_counts[block] > 1

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain of hashes that is in the cache; no reference is added."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: taking them makes fewer available."""
        return sum(block in self._cached for block in blocks)

    def register(self, block: int, name: bytes) -> None:
        """Note what a block in use holds; if another block is known to hold it, that one stays the one to be found."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use"
        if name not in self._block_of and block not in self._hash_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference of each block, in the order of a block table; returns those that are free now."""
        freed: list[int] = []
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is not in use"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)
                freed.append(block)
        return freed[::-1]

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget what blocks in use hold; then they cannot be found."""
        for block in blocks:
            name = self._hash_of.pop(block, None)
            if name is not None:
                del self._block_of[name]

    def forget_cached(self) -> None:
        """Make every cached block a free one."""
        for block in list(self._cached):
            self._evict(block)

    def _evict(self, block: int) -> None:
        """Make a cached block a free one."""
        del self._cached[block]
        self.forget([block])
        self._free.append(block)

    def check_integrity(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Raise AssertionError unless the books balance: a bug of ours, looked for in tests.

        Args:
            block_tables: all block tables there are; then each block's references are counted against them.
        """
        assert self.num_free + self.num_used + self.num_cached == self.num_usable
        assert NULL_BLOCK not in self._free, "the null block is in the free list"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is in use"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert {block: name for name, block in self._block_of.items()} == self._hash_of, "two hashes name a block"
        free = set(self._free)
        assert not free & self._hash_of.keys(), "a free block has content"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block has no content"
        assert not free & self._cached.keys(), "a block is free and cached"
        for block in range(1, self.num_blocks):
            is_idle = block in free or block in self._cached
            assert (self._ref_counts[block] == 0) == is_idle, f"block {block} is neither free nor in use"
            assert self._ref_counts[block] >= 0, f"block {block} has a negative reference count"
        if block_tables is not None:
            held = [0] * self.num_blocks
            for table in block_tables:
                for block in table:
                    held[block] += 1
            assert held == self._ref_counts, "the block tables and the reference counts disagree"
