"""Names for the content of cache blocks: a hash of all tokens up to the block's end, and of what else decides them.

    hash of block i = sha256(hash of block i - 1, tokens of block i);   before the first block: the root

Two full blocks with the same name hold the same keys and values, whichever requests computed them. sha256, because
whoever could make two texts collide would read what others wrote into the cache.
"""

import hashlib
from array import array
from collections.abc import Sequence


def hash_root(*extra_keys: object) -> bytes:
    """What chains start from: everything besides the tokens that decides what is in a block.

    Args:
        extra_keys: the model and its revision, the adapter, the type of the cache, the salt of a tenant.
    """
    return hashlib.sha256(repr(extra_keys).encode()).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], kv_block_size: int) -> None:
    """Add the hashes of the blocks that ``token_ids`` fill, beyond those that are known already."""
    for index in range(len(hashes), len(token_ids) // kv_block_size):
        digest = hashlib.sha256(hashes[-1] if hashes else root)
        digest.update(array("q", token_ids[index * kv_block_size : (index + 1) * kv_block_size]).tobytes())
        hashes.append(digest.digest())
