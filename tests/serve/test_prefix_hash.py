"""Names of cache blocks: the chain written out, and everything that must make another name."""

import hashlib
import struct

from quantkit.serve.prefix_hash import extend_block_hashes, hash_root


def hashes_of(token_ids: list[int], root: bytes = b"root", size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, root, token_ids, size)
    return hashes


def test_the_chain_is_sha256_of_parent_and_tokens() -> None:
    first = hashlib.sha256(b"root" + struct.pack("<4q", 5, 6, 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 9, 10, 11, 12)).digest()
    assert hashes_of([5, 6, 7, 8, 9, 10, 11, 12]) == [first, second]


def test_only_full_blocks_have_a_name_and_it_does_not_depend_on_how_they_grew() -> None:
    token_ids = list(range(11))
    assert len(hashes_of(token_ids)) == 2
    grown: list[bytes] = []
    for length in range(12):
        extend_block_hashes(grown, b"root", token_ids[:length], 4)
    assert grown == hashes_of(token_ids)


def test_other_tokens_anywhere_before_another_root_or_block_size_make_another_name() -> None:
    token_ids = list(range(12))
    names = hashes_of(token_ids)
    for place in range(12):
        changed = hashes_of([*token_ids[:place], 99, *token_ids[place + 1 :]])
        assert [a == b for a, b in zip(names, changed, strict=True)] == [block < place // 4 for block in range(3)]
    assert not set(names) & set(hashes_of(token_ids, root=b"other"))
    assert not set(names) & set(hashes_of(token_ids, size=3))


def test_every_extra_key_changes_the_root() -> None:
    keys = ("model", "revision", "bfloat16", "auto", None)
    roots = {hash_root(*keys)}
    for place in range(len(keys)):
        roots.add(hash_root(*keys[:place], "other", *keys[place + 1 :]))
    assert len(roots) == 1 + len(keys)
    assert hash_root("ab", "c") != hash_root("a", "bc")
