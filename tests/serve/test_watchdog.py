"""A scheduler that plans nothing, or the same again and again, fails a request with its state instead of hanging."""

from typing import Any

import pytest

from quantkit.serve import SamplingParams
from quantkit.serve.scheduler import Scheduled
from quantkit.serve.watchdog import Watchdog

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_an_empty_plan_fails_one_request_after_the_other(
    engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = [engine.add_request(random_prompt(5, seed), GREEDY) for seed in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", lambda: [])
        outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(names[0], "error")]
    state = (
        f"running []; waiting [{names[0]}/0:waiting:0/5 tokens:0+0 blocks {names[1]}/0:waiting:0/5 tokens:0+0 blocks]"
    )
    assert f"the engine makes no progress ({state}; blocks used 0, cached 0, free" in outputs[0].error
    assert "the engine makes no progress" in caplog.text
    tokens = []
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 5  # the other one got through


def test_requests_that_preempt_each_other_for_ever_are_noticed(
    engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step computes something, and none of it is new."""
    names = [engine.add_request(random_prompt(20, seed), GREEDY) for seed in range(2)]
    engine.step()
    monkeypatch.setattr(engine._watchdog, "_max_idle_steps", 10)
    schedule = engine.scheduler.schedule

    def restarted() -> Any:
        for request in list(engine.scheduler.running):
            request.num_computed_tokens = 0
            engine.scheduler._preempt(request)
        return [Scheduled(part.request, part.start, 1) for part in schedule()]

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", restarted)
        outputs = [output for _ in range(12) for output in engine.step()]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(names[0], "error")]
    engine.abort(names[1])


def test_progress_is_what_was_never_computed_before(random_prompt: Any, engine: Any) -> None:
    engine.add_request(random_prompt(9, 1), GREEDY)
    (request,) = engine.unfinished
    watchdog = Watchdog(2)
    assert not watchdog.is_stuck([Scheduled(request, 0, 9)])
    assert [watchdog.is_stuck([Scheduled(request, 0, 5)]) for _ in range(4)] == [False, False, True, False]
    assert not watchdog.is_stuck([Scheduled(request, 9, 1)])
    assert watchdog.is_stuck([])
    engine.abort(request.request_id)
