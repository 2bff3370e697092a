"""The block pool under any order of operations, against a plain count of who holds what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quantkit.serve.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Tables that take, share and give back blocks, and content that is noted, found and forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, kv_block_size=4)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what each block would hold if the pool forgot nothing

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            num_free, num_cached = self.pool.num_free, self.pool.num_cached
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not self.held & set(blocks)
            assert NULL_BLOCK not in blocks
            assert self.pool.num_cached == num_cached - max(0, count - num_free)  # no content is lost without need
            for block in blocks:
                self.content.pop(block, None)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data: st.DataObject, name: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if table:
            block = data.draw(st.sampled_from(table))
            if block not in self.content:
                self.pool.register(block, bytes([name]))
                if self.pool.find([bytes([name])]) == [block]:
                    self.content[block] = bytes([name])

    @rule(names=st.lists(st.integers(0, 5), max_size=3))
    def find_and_take(self, names: list[int]) -> None:
        found = self.pool.find([bytes([name]) for name in names])
        assert [self.content[block] for block in found] == [bytes([name]) for name in names[: len(found)]]
        self.pool.share(found)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget(table)
        for block in table:
            self.content.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        freed = self.pool.free(table)
        assert set(freed) == {block for block in table if block not in self.held and block not in self.content}

    @rule()
    def forget_cached(self) -> None:
        self.pool.forget_cached()
        self.content = {block: name for block, name in self.content.items() if block in self.held}

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_available == 11 - len(self.held)
        assert self.pool.num_cached == len(self.content.keys() - self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_lone_request_gets_neighbours_again_and_again() -> None:
    pool = BlockPool(10, 16)
    for _ in range(3):
        table = pool.allocate(2) + pool.allocate(1) + pool.allocate(3)
        assert table == [1, 2, 3, 4, 5, 6]
        pool.free(table)


def cached_chains(pool: BlockPool, *names: bytes) -> None:
    """Requests of two blocks each, one after the other."""
    for name in names:
        table = pool.allocate(2)
        for index, block in enumerate(table):
            pool.register(block, name + bytes([index]))
        pool.free(table)


def test_what_was_used_least_recently_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    pool = BlockPool(7, 4)
    cached_chains(pool, b"a", b"b", b"c")
    assert (pool.num_free, pool.num_cached) == (0, 6)
    first = pool.find([b"a\0", b"a\1"])
    pool.share(first)  # a is used again
    pool.free(first)
    gone = []
    for _ in range(6):
        known = set(pool._block_of)
        pool.allocate(1)
        gone += known - set(pool._block_of)
    assert gone == [b"b\1", b"b\0", b"c\1", b"c\0", b"a\1", b"a\0"]


def test_a_chain_is_found_up_to_the_first_block_that_is_gone() -> None:
    pool = BlockPool(9, 4)
    table = pool.allocate(4)
    for index, block in enumerate(table):
        pool.register(block, bytes([index]))
    assert pool.find([bytes([index]) for index in range(5)]) == table
    pool.forget(table[1:2])
    assert pool.find([bytes([index]) for index in range(5)]) == table[:1]
    other = pool.allocate(1)
    pool.register(other[0], bytes([0]))  # the same content again: the first block stays the known one
    assert pool.find([bytes([0])]) == table[:1]
    pool.free(other)
    assert pool.num_cached == 0


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(10, 16)
    assert [pool.blocks_for(count) for count in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free"),
        (lambda pool: pool._free.append(NULL_BLOCK), "null block|free"),
        (lambda pool: pool._free.pop(), "neither free nor in use"),
        (lambda pool: pool._ref_counts.__setitem__(2, -1), "neither free nor in use|negative"),
    ],
)
def test_broken_books_are_noticed(break_it: object, message: str) -> None:
    pool = BlockPool(6, 4)
    break_it(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_a_block_table_that_lies_is_noticed() -> None:
    pool = BlockPool(6, 4)
    table = pool.allocate(2)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity([table, table[:1]])


def test_what_is_not_there_cannot_be_taken_or_given_back() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are available"):
        pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="not in use"):
        pool.free(table)
    with pytest.raises(AssertionError, match="not in use"):
        pool.share(table)
