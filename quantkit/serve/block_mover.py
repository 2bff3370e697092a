"""Copies what is in cache blocks: from one to another, to host memory, and back."""

from collections.abc import Sequence

from quantkit.serve.kv_cache import KVCache


class BlockMover:
    """The copies that a scheduler asks for. They are done at once: no step runs while one is planned.

    Args:
        cache: the cache; None for a scheduler without memory behind its numbers.
        host: blocks in host memory; None if nothing can be swapped.
    """

    def __init__(self, cache: KVCache | None = None, host: KVCache | None = None) -> None:
        self._cache = cache
        self._host = host
        self.num_host_blocks = 0 if host is None else host.num_blocks
        self._free = list(range(self.num_host_blocks - 1, -1, -1))

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of host memory that can be had."""
        return len(self._free)

    def copy(self, source: int, target: int) -> None:
        """Copy one block of the cache to another."""
        if self._cache is not None:
            self._cache.copy_to(self._cache, [source], [target])

    def swap_out(self, blocks: Sequence[int]) -> list[int]:
        """Copy blocks of the cache to the host, where there must be room; returns where they are."""
        cache, host = self._both()
        host_blocks = [self._free.pop() for _ in blocks]
        cache.copy_to(host, blocks, host_blocks)
        return host_blocks

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy blocks of the host to the cache, and free them."""
        cache, host = self._both()
        host.copy_to(cache, host_blocks, blocks)
        self.drop(host_blocks)

    def drop(self, host_blocks: Sequence[int]) -> None:
        """Free blocks of the host."""
        self._free.extend(reversed(host_blocks))

    def _both(self) -> tuple[KVCache, KVCache]:
        assert self._cache is not None, "there is no cache to copy"
        assert self._host is not None, "there is no host memory to swap to"
        return self._cache, self._host
