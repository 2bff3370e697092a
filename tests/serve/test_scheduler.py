"""The scheduler without a model: budgets, order, preemption, progress."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import UsageError
from quantkit.serve.block_pool import BlockPool
from quantkit.serve.request import Request, RequestStatus, SamplingParams
from quantkit.serve.scheduler import Scheduled, Scheduler


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
