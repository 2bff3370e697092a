"""The scheduler without a model: budgets, order, preemption, progress."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QueueFullError, UsageError
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.block_tables import BlockTables
from quantkit.serve.request import Request, RequestStatus
from quantkit.serve.sampling_params import SamplingParams
from quantkit.serve.scheduler import Scheduled, Scheduler
from quantkit.serve.waiting_queue import MAX_OVERTAKEN


def make_request(name: str, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(name, tuple(range(prompt)), params, max_tokens, frozenset(), None, None)


def make_scheduler(num_blocks: int, *, seqs: int = 8, tokens: int = 16, block: int = 4) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, block), seqs, tokens, max_model_len=1000)


def advance(scheduler: Scheduler, lookahead: int = 0) -> list[Scheduled]:
    """One step with a model that says 7; checks what holds for every step."""
    step = scheduler.schedule(lookahead)
    names = [part.request.request_id for part in step]
    assert len(set(names)) == len(names)
    assert sum(part.num_tokens for part in step) <= scheduler._max_num_batched_tokens
    assert len(scheduler.running) <= scheduler._max_num_seqs
    for part in step:
        assert part.num_tokens >= 1
        assert part.start == part.request.num_computed_tokens
        assert len(part.request.block_table) * scheduler._pool.kv_block_size >= part.start + part.num_tokens
        assert part.request.status is RequestStatus.RUNNING
    for part in step:
        part.request.num_computed_tokens += part.num_tokens
        if part.request.num_computed_tokens == part.request.num_tokens:
            _, status, _ = part.request.append_token(7)
            if status is not None:
                scheduler.finish(part.request, status)
    scheduler._pool.check_integrity(request.block_table for request in [*scheduler.running, *scheduler.waiting])
    return step


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12),
    num_blocks=st.integers(14, 40),
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 40),
    lookahead=st.integers(0, 3),
)
def test_every_request_ends_with_all_its_tokens(
    requests: list[tuple[int, int]], num_blocks: int, seqs: int, tokens: int, lookahead: int
) -> None:
    """13 blocks of 4 hold the longest request (30 + 19 tokens); so all must get through, whatever is preempted."""
    scheduler = make_scheduler(num_blocks, seqs=seqs, tokens=tokens)
    made = [make_request(str(number), prompt, count) for number, (prompt, count) in enumerate(requests)]
    for request in made:
        assert scheduler.resolve_max_tokens(request.num_prompt_tokens, request.max_tokens) == request.max_tokens
        scheduler.add(request)
    for _ in range(5000):
        if not advance(scheduler, lookahead):
            break
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler._pool.num_free == scheduler._pool.num_usable
    for request, (prompt, count) in zip(made, requests, strict=True):
        assert request.status is RequestStatus.FINISHED_LENGTH
        assert (request.num_prompt_tokens, request.num_output_tokens) == (prompt, count)


def test_decoding_requests_are_never_held_up_by_a_long_prompt() -> None:
    scheduler = make_scheduler(100, tokens=8)
    scheduler.add(make_request("decoding", 3, 50))
    advance(scheduler)
    scheduler.add(make_request("long", 60, 5))
    scheduler.add(make_request("next", 3, 5))
    for _ in range(5):
        step = advance(scheduler)
        assert [(part.request.request_id, part.num_tokens) for part in step] == [("decoding", 1), ("long", 7)]


def test_budget_left_over_goes_to_the_next_in_line() -> None:
    scheduler = make_scheduler(100, tokens=16)
    for name, prompt in (("a", 10), ("b", 10), ("c", 10)):
        scheduler.add(make_request(name, prompt, 5))
    step = scheduler.schedule()
    assert [(part.request.request_id, part.num_tokens, part.is_sampled) for part in step] == [
        ("a", 10, True),
        ("b", 6, False),
    ]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(100, seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 2, 3))
    assert [part.request.request_id for part in advance(scheduler)] == ["a", "b"]


def test_the_last_to_join_is_preempted_keeps_its_tokens_and_is_next_in_line() -> None:
    scheduler = make_scheduler(5, block=4)  # 4 usable blocks
    first, last = make_request("first", 8, 9), make_request("last", 7, 9)
    scheduler.add(first)
    scheduler.add(last)
    scheduler.add(make_request("waiting", 1, 1))
    advance(scheduler)
    assert (first.num_tokens, last.num_tokens, scheduler._pool.num_free) == (9, 8, 0)
    step = advance(scheduler)  # the first one needs a third block
    assert [part.request.request_id for part in step] == ["first"]
    assert last.status is RequestStatus.PREEMPTED
    assert (last.num_computed_tokens, last.block_table, last.num_tokens, last.num_preemptions) == (0, [], 8, 1)
    assert [request.request_id for request in scheduler.waiting] == ["last", "waiting"]
    assert scheduler.num_preemptions == 1
    while first.status is RequestStatus.RUNNING:
        assert last.status is RequestStatus.PREEMPTED  # 2 blocks for its 8 tokens are not there yet
        advance(scheduler)
    assert [part.num_tokens for part in advance(scheduler) if part.request is last] == [8]


def test_nobody_joins_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(6, block=4)  # 5 usable
    scheduler.add(make_request("first", 8, 9))
    scheduler.add(make_request("second", 8, 9))
    advance(scheduler)
    scheduler.add(make_request("small", 1, 1))
    first = scheduler.schedule()  # the first takes the last free block, the second none: it preempts itself
    assert [part.request.request_id for part in first] == ["first"]
    assert [request.request_id for request in scheduler.waiting] == ["second", "small"]


def test_lookahead_reserves_room_but_never_more_than_a_request_may_have() -> None:
    scheduler = make_scheduler(20, block=4)
    request = make_request("a", 4, 8)
    scheduler.add(request)
    scheduler.schedule(lookahead=3)
    assert len(request.block_table) == 2
    tight = make_scheduler(3, block=4)  # 2 usable blocks: 8 tokens, and one that is never computed
    request = make_request("b", 7, 2)
    tight.add(request)
    for _ in range(2):
        assert advance(tight, lookahead=4)
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(BlockPool(4, 16), 4, 16, max_model_len=64)  # 3 usable blocks: 48 tokens
    assert scheduler.resolve_max_tokens(40, 9) == 9  # the 49th token is never computed
    message = "a prompt of 40 tokens and max_tokens=10 need 4 cache blocks of 16 tokens, the whole cache has 3"
    with pytest.raises(UsageError, match=message):
        scheduler.resolve_max_tokens(40, 10)
    message = "a prompt of 60 tokens and max_tokens=5 are 65 tokens, more than max_model_len=64"
    with pytest.raises(UsageError, match=message):
        scheduler.resolve_max_tokens(60, 5)
    with pytest.raises(UsageError, match=r"a prompt of 64 tokens and max_tokens=1 or more are 65 tokens"):
        scheduler.resolve_max_tokens(64, None)
    assert scheduler.resolve_max_tokens(40, None) == 9  # what there is room for
    assert Scheduler(BlockPool(100, 16), 4, 16, 64).resolve_max_tokens(40, None) == 24


def test_a_request_moves_only_along_the_allowed_ways() -> None:
    request = make_request("a", 1, 1)
    for status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED_STOP, RequestStatus.WAITING):
        with pytest.raises(AssertionError, match="a: waiting ->"):
            request.move_to(status)
    request.move_to(RequestStatus.RUNNING)
    request.move_to(RequestStatus.FINISHED_STOP)
    assert request.status.is_finished
    for status in RequestStatus:
        with pytest.raises(AssertionError, match="a: stop ->"):
            request.move_to(status)


def test_a_full_queue_refuses_and_preempted_requests_always_have_room() -> None:
    pool = BlockPool(5, 4)
    scheduler = Scheduler(pool, 8, 16, 1000, max_num_waiting=1)
    scheduler.add(make_request("first", 8, 9))
    scheduler.schedule()
    scheduler.add(make_request("second", 7, 9))
    with pytest.raises(QueueFullError, match="1 requests are waiting, max_num_waiting=1"):
        scheduler.add(make_request("third", 1, 1))
    scheduler.schedule()  # the second joins
    scheduler.add(make_request("third", 1, 1))
    first = scheduler.running[0]
    first.num_computed_tokens = 8
    first.append_token(7)
    scheduler.schedule()  # the first grows and the second is preempted
    assert [request.request_id for request in scheduler.waiting] == ["second", "third"]


def prioritized(name: str, priority: int, prompt: int = 4, max_tokens: int = 1) -> Request:
    request = make_request(name, prompt, max_tokens)
    request.priority = priority
    return request


def test_requests_start_by_priority_and_in_order_of_arrival_within_one() -> None:
    scheduler = make_scheduler(100, seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        scheduler.add(prioritized(name, priority))
    assert [advance(scheduler)[0].request.request_id for _ in range(5)] == ["d", "b", "e", "a", "c"]


def test_the_least_urgent_request_is_preempted_whenever_it_came() -> None:
    scheduler = make_scheduler(5, block=4)  # 4 usable blocks
    late, early = prioritized("late", 5, 7, 9), prioritized("early", 0, 8, 9)
    scheduler.add(late)
    advance(scheduler)
    scheduler.add(early)
    advance(scheduler)
    while late.status is RequestStatus.RUNNING:
        advance(scheduler)
    assert early.status is RequestStatus.RUNNING
    assert [request.request_id for request in scheduler.waiting] == ["late"]


def test_nobody_waits_for_ever_behind_more_urgent_ones() -> None:
    scheduler = make_scheduler(100, seqs=1)
    scheduler.add(prioritized("patient", 9))
    started = 0
    while scheduler.waiting:
        scheduler.add(prioritized(f"urgent {started}", 0))
        if advance(scheduler)[0].request.request_id == "patient":
            break
        started += 1
    assert started == MAX_OVERTAKEN


def forked(scheduler: Scheduler, prompt: int, n: int, max_tokens: int = 6) -> list[Request]:
    """n continuations whose prompt is computed and whose first token is known."""
    leader, *followers = (make_request(str(index), prompt, max_tokens) for index in range(n))
    for index, follower in enumerate(followers):
        follower.index, follower.is_held = index + 1, True
    leader.followers = tuple(followers)
    scheduler.add(leader)
    scheduler.schedule()
    leader.num_computed_tokens = prompt
    assert scheduler.fork(leader) == followers
    for request in (leader, *followers):
        request.append_token(7)
    return [leader, *followers]


def test_continuations_share_full_blocks_and_copy_the_last_one_when_they_write() -> None:
    scheduler = make_scheduler(20, block=4)
    copies: list[tuple[int, int]] = []
    scheduler._tables._mover.copy = lambda source, target: copies.append((source, target))  # type: ignore[method-assign]
    requests = forked(scheduler, 10, 3)
    shared = list(requests[0].block_table)
    assert all(request.block_table == shared for request in requests)
    assert scheduler._pool.num_used == 3
    scheduler.schedule()
    assert [request.block_table[:2] for request in requests] == [shared[:2]] * 3
    lasts = [request.block_table[2] for request in requests]
    assert len(set(lasts)) == 3
    assert shared[2] in lasts  # the last one to write keeps the original
    assert copies == [(shared[2], block) for block in lasts if block != shared[2]]
    assert scheduler._pool.num_used == 5
    for request in requests:
        scheduler.finish(request, RequestStatus.FINISHED_STOP)
    scheduler._pool.check_integrity([])


def test_continuations_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    scheduler = make_scheduler(20, block=4)
    scheduler._tables._mover.copy = lambda source, target: pytest.fail("copied")  # type: ignore[method-assign]
    requests = forked(scheduler, 8, 3)
    scheduler.schedule()
    assert len({tuple(request.block_table[:2]) for request in requests}) == 1
    assert len({request.block_table[2] for request in requests}) == 3


def test_more_continuations_than_may_run_wait_for_their_turn() -> None:
    scheduler = make_scheduler(20, seqs=2)
    requests = forked(scheduler, 6, 5, max_tokens=3)
    step = advance(scheduler)
    assert [part.request for part in step] == requests[:2]
    assert [request.status for request in requests[2:]] == [RequestStatus.PREEMPTED] * 3
    for _ in range(20):
        advance(scheduler)
    assert all(request.status is RequestStatus.FINISHED_LENGTH for request in requests)


def cuts(chunk: int | None, prompt: int, others: int) -> list[tuple[int, int]]:
    """(start, tokens) of all parts of a request beside others, one of which preempts it once."""
    scheduler = Scheduler(BlockPool(100, 4), 6, 30, 1000, chunk=chunk)
    for index in range(others):
        scheduler.add(make_request(f"other {index}", 13 + 5 * index, 12))
    request = make_request("cut", prompt, 5)
    scheduler.add(request)
    found = []
    for step in range(80):
        if step == 6 and request.status is RequestStatus.RUNNING:
            scheduler.restart(request)
        found += [(part.start, part.num_tokens) for part in advance(scheduler) if part.request is request]
    assert request.status is RequestStatus.FINISHED_LENGTH
    return found


@pytest.mark.parametrize("prompt", [1, 23, 24, 25, 48, 61])
def test_with_a_fixed_chunk_a_request_is_cut_in_one_way(prompt: int) -> None:
    ends = [*range(24, prompt, 24), prompt, *range(prompt + 1, prompt + 5)]
    wanted = {(start, stop - start) for start, stop in zip([0, *ends], ends, strict=False)}
    for others in range(6):
        assert set(cuts(24, prompt, others)) == wanted
    assert prompt < 48 or set(cuts(None, prompt, 5)) != wanted


def test_only_whole_chunks_are_found_when_chunks_are_fixed() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(pool, 2, 10, 1000, tables=BlockTables(pool, enable_prefix_caching=True, chunk=8), chunk=8)
    for prompt, cached in ((21, 0), (21, 16), (16, 8), (17, 16), (30, 16), (30, 24)):
        request = make_request("a", prompt, 3)
        scheduler.add(request)
        while not request.status.is_finished:
            advance(scheduler)
        assert request.num_cached_tokens == cached
