"""Scheduler, block tables and pool under any order of arrivals, steps, aborts and interrupts; the model says 7."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.serve.block_mover import BlockMover
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.block_tables import BlockTables
from quantkit.serve.preemption import PreemptionCost
from quantkit.serve.request import Request, RequestStatus
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.scheduler import Scheduled, Scheduler
from quantkit.serve.waiting_queue import order

BLOCK, BLOCKS, HOST_BLOCKS = 4, 14, 5  # 13 usable blocks: 52 tokens
MAX_SEQS, MAX_TOKENS = 4, 16


class Contents:
    """A cache that holds, for each slot, the tokens of a request up to that slot: what a key depends on."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.slots: list[Any] = [None] * num_blocks * BLOCK

    def copy_to(self, target: "Contents", sources: list[int], targets: list[int]) -> None:
        copied = [self.slots[block * BLOCK : (block + 1) * BLOCK] for block in sources]
        for block, slots in zip(targets, copied, strict=True):
            target.slots[block * BLOCK : (block + 1) * BLOCK] = slots


class ServingMachine(RuleBasedStateMachine):
    """Every request must see its own tokens in the cache, end once, and not wait for ever."""

    @initialize(caching=st.booleans(), swapping=st.booleans(), chunk=st.sampled_from([None, 4, 12]))
    def start(self, caching: bool, swapping: bool, chunk: int | None) -> None:
        self.cache: Any = Contents(BLOCKS)
        self.host: Any = Contents(HOST_BLOCKS)
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.mover = BlockMover(self.cache, self.host)
        self.tables = BlockTables(
            self.pool,
            enable_prefix_caching=caching,
            chunk=chunk,
            mover=self.mover,
            cost=PreemptionCost(10, 100, 50, MAX_TOKENS) if swapping else None,
        )
        self.scheduler = Scheduler(self.pool, MAX_SEQS, MAX_TOKENS, 100, tables=self.tables, chunk=chunk)
        self.chunk = chunk
        self.live: list[Request] = []
        self.num_made = 0
        self.ended: dict[tuple[str, int], RequestStatus] = {}

    @rule(
        shared=st.integers(0, 30),
        own=st.integers(1, 10),
        new=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def arrive(self, shared: int, own: int, new: int, n: int, priority: int) -> None:
        prompt = (*range(shared), *(100 + self.num_made for _ in range(own)))
        params = SamplingParams(temperature=0, max_tokens=new)
        made = [
            Request(
                f"r{self.num_made}", prompt, params, new, frozenset(), None, None,
                index=index, priority=priority, is_held=index > 0,
            )
            for index in range(n)
        ]  # fmt: skip
        made[0].followers = tuple(made[1:])
        assert self.scheduler.resolve_max_tokens(len(prompt), new) == new
        self.scheduler.add(made[0])
        self.live += made
        self.num_made += 1

    @precondition(lambda self: self.live)
    @rule()
    def step(self) -> None:
        planned = self.plan()
        for part in planned:
            self.compute(part)
        for part in planned:
            part.request.num_computed_tokens += part.num_tokens
        for request in [
            part.request for part in planned if part.request.num_computed_tokens == part.request.num_tokens
        ]:
            for taker in (request, *self.scheduler.fork(request)):
                _, status, _ = taker.append_token(7)
                if status is not None:
                    self.end(taker, status)

    @precondition(lambda self: self.live)
    @rule()
    def interrupted_step(self) -> None:
        for part in self.plan():
            self.scheduler.restart(part.request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live)).request_id
        for request in [request for request in self.live if request.request_id == name]:
            self.end(request, RequestStatus.FINISHED_ABORT)

    @rule()
    def forget_cached(self) -> None:
        self.pool.forget_cached()

    def plan(self) -> list[Scheduled]:
        before = {id(request): request.num_preemptions for request in self.live}
        planned = self.scheduler.schedule()
        assert planned, "there are requests and nothing to do"
        assert sum(part.num_tokens for part in planned) <= MAX_TOKENS
        assert len(self.scheduler.running) <= MAX_SEQS
        assert len({id(part.request) for part in planned}) == len(planned)
        preempted = [request for request in self.live if request.num_preemptions > before[id(request)]]
        for request in preempted:
            assert all(order(other) < order(request) for other in self.scheduler.running)
        return planned

    def compute(self, part: Scheduled) -> None:
        """Attention sees the right tokens in the cache, and stores the new ones in blocks of its own."""
        request, stop = part.request, part.start + part.num_tokens
        assert part.num_tokens >= 1
        if self.chunk is not None and part.start < request.num_prompt_tokens:
            assert part.start % self.chunk == 0
            assert stop % self.chunk == 0 or stop == request.num_prompt_tokens
        slots = [request.block_table[place // BLOCK] * BLOCK + place % BLOCK for place in range(stop)]
        for place in range(part.start, stop):
            assert not self.pool.is_shared(slots[place] // BLOCK) or self.is_complete(request, place)
            self.cache.slots[slots[place]] = tuple(request.token_ids[: place + 1])
        for place in range(stop):
            assert self.cache.slots[slots[place]] == tuple(request.token_ids[: place + 1])

    def is_complete(self, request: Request, place: int) -> bool:
        """A block that another request found in this very step: both agree on what is written into it."""
        return (place // BLOCK + 1) * BLOCK <= request.num_tokens

    def end(self, request: Request, status: RequestStatus) -> None:
        assert (request.request_id, request.index) not in self.ended
        self.ended[request.request_id, request.index] = status
        self.scheduler.finish(request, status)
        self.live.remove(request)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(request.block_table for request in self.live)
        swapped = sum(len(request.swapped_blocks) for request in self.live)
        assert self.mover.num_free_host_blocks + swapped == HOST_BLOCKS
        assert list(self.scheduler.waiting) == sorted(self.scheduler.waiting, key=order)
        assert self.scheduler.running == sorted(self.scheduler.running, key=order)
        queued = len(self.scheduler.running) + len(self.scheduler.waiting)
        assert queued + sum(request.is_held for request in self.live) == len(self.live)

    def teardown(self) -> None:
        """Whatever is left gets through without help."""
        if not hasattr(self, "pool"):
            return
        tokens = sum(request.num_prompt_tokens + request.max_tokens for request in self.live)
        for _ in range(20 * (tokens + math.ceil(tokens / BLOCK))):
            if not self.live:
                break
            self.step()
        assert not self.live
        assert self.pool.num_available == self.pool.num_usable
        names = {name for name, _ in self.ended}
        assert len(names) == self.num_made


TestServingMachine = ServingMachine.TestCase
TestServingMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
