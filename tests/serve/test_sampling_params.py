"""Every field of SamplingParams acts in the engine, and n continuations share their prompt."""

from typing import Any

import pytest

from quantkit.errors import QueueFullError, UsageError
from quantkit.serve import SamplingParams
from quantkit.serve.structured import StructuredOutput


def greedy(engine: Any, prompt: list[int], **settings: Any) -> Any:
    return engine.generate([prompt], SamplingParams(temperature=0, **{"max_tokens": 20, **settings}))[0]


def test_a_bias_makes_a_token_come_or_not(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 1)
    assert set(greedy(engine, prompt, logit_bias={77: 100}).token_ids) == {77}
    first = greedy(engine, prompt).token_ids[0]
    assert first not in greedy(engine, prompt, logit_bias={first: -100}).token_ids


def test_a_repetition_penalty_makes_tokens_differ(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 1)
    assert len(set(greedy(engine, prompt, ignore_eos=True, repetition_penalty=1000.0).token_ids)) == 20
    tokens = greedy(engine, prompt, ignore_eos=True, presence_penalty=2, frequency_penalty=2).token_ids
    assert len(set(tokens)) >= len(set(greedy(engine, prompt, ignore_eos=True).token_ids))


def test_top_k_of_one_is_greedy_at_any_temperature(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 1)
    wanted = greedy(engine, prompt, ignore_eos=True).token_ids
    for settings in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        params = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True, seed=1, **settings)
        assert engine.generate([prompt], params)[0].token_ids == wanted


def test_min_tokens_holds_back_stop_tokens(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 2)
    free = greedy(engine, prompt, ignore_eos=True).token_ids
    stop = free[1]
    assert len(greedy(engine, prompt, stop_token_ids=[stop], ignore_eos=True).token_ids) <= 2
    held = greedy(engine, prompt, stop_token_ids=[stop], min_tokens=8, ignore_eos=True).token_ids
    assert len(held) >= 8
    assert stop not in held[:8]


def test_a_stop_string_within_min_tokens_does_not_end_the_text_and_is_not_cut(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(6, 3)
    free = greedy(engine, prompt, ignore_eos=True)
    stop = engine.tokenizer.decode([free.token_ids[2]])
    assert stop
    early = greedy(engine, prompt, stop=stop, ignore_eos=True)
    assert len(early.token_ids) <= 3
    late = greedy(engine, prompt, stop=stop, min_tokens=20, ignore_eos=True)
    assert (late.token_ids, late.text, late.finish_reason) == (free.token_ids, free.text, "length")
    between = greedy(engine, prompt, stop=stop, min_tokens=4, ignore_eos=True)
    assert between.token_ids[:4] == free.token_ids[:4]
    head = engine.tokenizer.decode(list(free.token_ids[:4]), skip_special_tokens=True)
    assert between.text.startswith(head.rstrip("\ufffd"))


def test_min_tokens_beyond_the_room_is_refused(engine: Any, random_prompt: Any) -> None:
    with pytest.raises(UsageError, match="min_tokens=100 is more than the 56 tokens there is room for"):
        engine.add_request(random_prompt(200, 1), SamplingParams(max_tokens=None, min_tokens=100))


def test_a_biased_token_must_be_known(engine: Any) -> None:
    with pytest.raises(UsageError, match="logit_bias holds 320, the vocabulary has 320 tokens"):
        engine.add_request([5], SamplingParams(logit_bias={320: 1.0}))


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 12, "max_num_batched_tokens": 24}, {"max_num_seqs": 2}])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_n_continuations_are_those_of_n_requests(
    settings: dict[str, int], length: int, make_engine: Any, random_prompt: Any
) -> None:
    """With room, with preemptions and with more of them than may run; the prompt is computed once."""
    engine = make_engine("llama", **settings)
    prompt = random_prompt(length, 5)
    params = {"temperature": 1.2, "max_tokens": 20, "ignore_eos": True}
    single = [SamplingParams(seed=60 + index, **params) for index in range(5)]
    wanted = [completion.token_ids for completion in make_engine("llama").generate([prompt] * 5, single)]
    engine.reset_prefix_cache()
    before = engine.metrics.computed_tokens, engine.metrics.prompt_tokens
    found = engine.generate([prompt], SamplingParams(seed=60, n=5, **params))
    assert [completion.index for completion in found] == [0, 1, 2, 3, 4]
    assert [completion.token_ids for completion in found] == wanted
    assert len(set(wanted)) > 1
    assert engine.metrics.prompt_tokens - before[1] == length
    if not settings:
        assert engine.metrics.computed_tokens - before[0] == length + 5 * 19
    engine.check_all_free()


def test_each_continuation_has_one_last_output_and_an_abort_ends_all(make_engine: Any, random_prompt: Any) -> None:
    engine = make_engine("llama", max_num_batched_tokens=16)
    params = SamplingParams(n=3, seed=1, max_tokens=10)
    for steps in (0, 1, 4):
        name = engine.add_request(random_prompt(30, 1), params)
        ended = [output for _ in range(steps) for output in engine.step() if output.finish_reason]
        ended += engine.abort(name)
        assert sorted(output.index for output in ended) == [0, 1, 2]
        assert not engine.has_unfinished
        engine.check_all_free()


def test_a_prompt_that_fails_fails_for_all_its_continuations(
    engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: Any) -> None:
        raise RuntimeError("no memory left")

    engine.add_request(random_prompt(30, 1), SamplingParams(n=3))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", broken)
        failed = engine.step()
    assert [(output.index, output.finish_reason) for output in failed] == [(0, "error"), (1, "error"), (2, "error")]
    assert not engine.has_unfinished


def test_a_priority_needs_its_policy_and_a_full_queue_refuses(make_engine: Any) -> None:
    with pytest.raises(UsageError, match="priority=3 needs scheduling_policy='priority'"):
        make_engine("llama").add_request([5], priority=3)
    engine = make_engine("llama", scheduling_policy="priority", max_num_seqs=1, max_num_waiting=2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request([5], params, request_id="running")
    engine.step()
    engine.add_request([6], params, request_id="late", priority=1)
    engine.add_request([7], params, request_id="urgent", priority=-1)
    with pytest.raises(QueueFullError, match="2 requests are waiting, max_num_waiting=2"):
        engine.add_request([8], params, request_id="refused")
    ended = []
    while engine.has_unfinished:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["running", "urgent", "late"]


@pytest.mark.parametrize("settings", [{"temperature": 1e-300}, {"temperature": 1e-46}, {"temperature": 5e-324}])
def test_a_temperature_that_float32_does_not_hold_is_greedy(
    engine: Any, random_prompt: Any, settings: dict[str, float]
) -> None:
    prompt = random_prompt(6, 1)
    assert (
        engine.generate([prompt], SamplingParams(max_tokens=8, **settings))[0].token_ids
        == greedy(engine, prompt, max_tokens=8).token_ids
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 5e-324, "top_k": 5},
        {"top_p": 1e-46},
        {"min_p": 5e-324},
        {"top_k": 10**30},
        {"temperature": 1e6},
        {"temperature": 1e-30, "min_p": 1.0},
        {"repetition_penalty": 1e6},
        {"repetition_penalty": 1e-6},
        {"presence_penalty": 5e-324, "frequency_penalty": -2},
        {"logit_bias": {7: 5e-324, 8: -100, 9: 100}},
        {"seed": 2**63 - 1, "n": 2},
    ],
    ids=str,
)
def test_extreme_values_leave_neighbours_alone(engine: Any, random_prompt: Any, settings: dict[str, Any]) -> None:
    wanted = greedy(engine, random_prompt(6, 1), max_tokens=4).token_ids
    params = [SamplingParams(max_tokens=4, **settings), SamplingParams(max_tokens=4, temperature=0)]
    found = engine.generate([random_prompt(6, 2), random_prompt(6, 1)], params)
    assert found[-1].token_ids == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 1e308}, r"temperature=1e\+308 is not a number of 0 or more, up to 1e\+06"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"repetition_penalty": 1e308}, r"repetition_penalty=1e\+308 is not a number above 0, from 1e-06 to 1e\+06"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty=1e-308 is not a number above 0"),
        ({"stop": ["a", "\ud800"]}, "stop is not UTF-8 text"),
        (
            {"min_tokens": 2, "structured": StructuredOutput.regex("a+")},
            "min_tokens=2 and a form of the answer exclude each other",
        ),
    ],
    ids=str,
)
def test_what_the_engine_cannot_follow_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**settings)


def test_a_salt_is_text(engine: Any) -> None:
    with pytest.raises(UsageError, match="cache_salt is not UTF-8 text"):
        engine.add_request([7], SamplingParams(), cache_salt="\ud800")
