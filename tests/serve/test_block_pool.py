"""The block pool under any order of operations, against a plain count of who holds what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quantkit.serve.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Tables that take, share and give back blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=12, kv_block_size=4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            held = {block for table in self.tables for block in table}
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count
            assert not held & set(blocks)
            assert NULL_BLOCK not in blocks
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        freed = self.pool.free(table)
        held = {block for other in self.tables for block in other}
        assert set(freed) == set(table) - held

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free == 11 - len(held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_lone_request_gets_neighbours_again_and_again() -> None:
    pool = BlockPool(10, 16)
    for _ in range(3):
        table = pool.allocate(2) + pool.allocate(1) + pool.allocate(3)
        assert table == [1, 2, 3, 4, 5, 6]
        pool.free(table)


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
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="not in use"):
        pool.free(table)
    with pytest.raises(AssertionError, match="not in use"):
        pool.share(table)
