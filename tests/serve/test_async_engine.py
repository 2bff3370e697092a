import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quantkit.errors import QueueFullError, UsageError
from quantkit.serve import SamplingParams
from quantkit.serve.async_engine import AsyncEngine, EngineStoppedError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def run(engine: Any) -> Callable[..., Any]:
    """``run(lambda front: ...)``: a coroutine over a started front, which is drained after it."""

    def go(function: Callable[[AsyncEngine], Coroutine[Any, Any, Any]], drain_s: float = 10.0) -> Any:
        async def inside() -> Any:
            front = AsyncEngine(engine)
            front.start()
            try:
                return await function(front)
            finally:
                await front.drain(drain_s)
                assert front.num_unfinished == 0

        return asyncio.run(asyncio.wait_for(inside(), 60))

    return go


async def read(stream: Any) -> tuple[dict[int, list[int]], list[tuple[int, str]]]:
    tokens: dict[int, list[int]] = {}
    ends = []
    async for output in stream:
        tokens.setdefault(output.index, []).extend(output.token_ids)
        if output.finish_reason:
            ends.append((output.index, output.finish_reason))
    return tokens, ends


def test_many_at_a_time_as_alone(run: Any, engine: Any, random_prompt: Any) -> None:
    prompts = [random_prompt(5 + 7 * i, i) for i in range(6)]
    expected = [list(done.token_ids) for done in engine.generate(prompts, GREEDY)]

    async def together(front: AsyncEngine) -> Any:
        async def one(prompt: list[int]) -> Any:
            return await read(await front.submit([prompt], GREEDY))

        return await asyncio.gather(*map(one, prompts))

    for (tokens, ends), alone in zip(run(together), expected, strict=True):
        assert tokens == {0: alone}
        assert ends == [(0, "length")]


def test_several_prompts_and_continuations(run: Any, engine: Any, random_prompt: Any) -> None:
    prompts = [random_prompt(9, 1), random_prompt(20, 2)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=6, ignore_eos=True)
    expected = {i: list(done.token_ids) for i, done in enumerate(engine.generate(prompts, params))}

    async def both(front: AsyncEngine) -> Any:
        return await read(await front.submit(prompts, params))

    tokens, ends = run(both)
    assert tokens == expected
    assert sorted(ends) == [(index, "length") for index in range(4)]


def test_abort_ends_every_continuation_once(run: Any, engine: Any, random_prompt: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=200, ignore_eos=True)

    async def leave(front: AsyncEngine) -> Any:
        stream = await front.submit([random_prompt(9, 1)], params)
        await anext(stream)
        stream.abort()
        stream.abort()
        _, ends = await read(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return ends

    assert sorted(run(leave)) == [(0, "abort"), (1, "abort"), (2, "abort")]


def test_a_cancelled_submit_leaves_nothing(run: Any, random_prompt: Any) -> None:
    async def cancel(front: AsyncEngine) -> None:
        task = asyncio.create_task(front.submit([random_prompt(9, 1)], GREEDY))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await front.call(lambda: None)
        assert front.num_unfinished == 0

    run(cancel)


def test_all_prompts_or_none(run: Any, engine: Any, random_prompt: Any) -> None:
    async def refuse(front: AsyncEngine) -> None:
        with pytest.raises(UsageError, match="the prompt holds token 99999"):
            await front.submit([random_prompt(9, 1), [99999]], GREEDY)
        await front.call(lambda: None)
        assert not engine.has_unfinished

    run(refuse)


def test_an_error_in_a_step_ends_its_requests_alone(
    run: Any, engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(front: AsyncEngine) -> Any:
        def explode() -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", explode)
            outputs = [output async for output in await front.submit([random_prompt(9, 1)], GREEDY)]
        assert [(output.finish_reason, output.error) for output in outputs] == [("error", "RuntimeError: no")]
        return await read(await front.submit([random_prompt(9, 1)], GREEDY))

    _, ends = run(fail)
    assert ends == [(0, "length")]


def test_lost_requests_are_ended(run: Any, engine: Any, random_prompt: Any) -> None:
    """A bug of the engine's must not leave a client waiting for ever."""

    async def lose(front: AsyncEngine) -> Any:
        stream = await front.submit([random_prompt(9, 1)], SamplingParams(max_tokens=200, ignore_eos=True))
        await front.call(lambda: engine.abort(stream.request_ids[0]))
        return [output async for output in stream][-1]

    last = run(lose)
    assert last.finish_reason == "error"
    assert "lost requests" in last.error


def test_drain_lets_requests_end_and_takes_no_new_ones(run: Any, random_prompt: Any) -> None:
    async def drain(front: AsyncEngine) -> Any:
        stream = await front.submit([random_prompt(9, 1)], GREEDY)
        draining = asyncio.create_task(front.drain(20))
        await asyncio.sleep(0)
        assert not front.is_running
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await front.submit([random_prompt(9, 1)], GREEDY)
        _, ends = await read(stream)
        await draining
        return ends

    assert run(drain) == [(0, "length")]


def test_drain_ends_what_takes_too_long(run: Any, engine: Any, random_prompt: Any) -> None:
    async def drain(front: AsyncEngine) -> Any:
        stream = await front.submit([random_prompt(9, 1)], SamplingParams(max_tokens=240, ignore_eos=True))
        await front.drain(0)
        _, ends = await read(stream)
        return ends

    assert run(drain) == [(0, "abort")]


def test_a_full_queue(make_engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama", max_num_waiting=1)
    monkeypatch.setattr(engine, "step", lambda: [])

    async def fill() -> None:
        front = AsyncEngine(engine)
        front.start()
        await front.submit([random_prompt(9, 1)], GREEDY)
        with pytest.raises(QueueFullError):
            await front.submit([random_prompt(9, 1)], GREEDY)
        assert front.num_unfinished == 1
        await front.drain(0)

    asyncio.run(asyncio.wait_for(fill(), 60))
    engine.check_all_free()
