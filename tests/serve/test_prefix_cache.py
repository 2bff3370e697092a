"""The prefix cache in the engine: the same tokens with it and without, and much less to compute."""

from typing import Any

import pytest

from quantkit.serve import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FAMILIES = ("llama", "gemma3", "mixtral")  # plain, with sliding windows, with experts


def computed(engine: Any, prompts: list[Any], params: Any = GREEDY) -> tuple[list[Any], int]:
    """Completions, and the tokens that went through the model for them."""
    before = engine.metrics.computed_tokens
    completions = engine.generate(prompts, params)
    return completions, engine.metrics.computed_tokens - before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_gives_the_tokens_of_a_miss(
    family: str, make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    """The second prompt shares every number of tokens with the first, around the ends of blocks of 16."""
    engine = make_engine(family)
    first = random_prompt(70, 1)
    engine.generate([first], GREEDY)
    for shared, cached in ((0, 0), (15, 0), (16, 16), (17, 16), (47, 32), (64, 64), (69, 64)):
        prompt = first[:shared] + random_prompt(9, 100 + shared)
        assert prompt[shared] != first[shared] or shared == 69
        (completion,), tokens = computed(engine, [prompt])
        assert completion.token_ids == reference_tokens(family, prompt, 12)
        assert completion.num_cached_tokens == cached
        assert tokens == len(prompt) - cached + len(completion.token_ids) - 1


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_the_last_token_is_computed_even_if_all_are_known(
    length: int, engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    prompt = random_prompt(length, 7)
    for _ in range(2):
        (completion,) = engine.generate([prompt], GREEDY)
        assert completion.token_ids == reference_tokens("llama", prompt, 12)
    assert completion.num_cached_tokens == (length - 1) // 16 * 16


def test_new_tokens_are_found_too(engine: Any, random_prompt: Any) -> None:
    """The next turn of a chat begins with the whole turn before."""
    prompt = random_prompt(10, 3)
    (turn,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    (again,) = engine.generate([[*prompt, *turn.token_ids, 7, 8, 9]], GREEDY)
    assert again.num_cached_tokens == 32  # of 39 tokens in the cache, the last one of 40 was never computed


def test_requests_of_one_step_share_what_the_first_of_them_computes(
    make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    engine = make_engine("llama", max_num_seqs=32, max_num_batched_tokens=256)
    shared = random_prompt(200, 5)
    prompts = [shared + random_prompt(6, seed) for seed in range(32)]
    params = SamplingParams(temperature=0, max_tokens=1)
    completions, tokens = computed(engine, prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference_tokens("llama", prompt, 1)
    assert [completion.num_cached_tokens for completion in completions] == [0] + [192] * 31
    assert tokens == 206 + 31 * 14
    assert sum(map(len, prompts)) > 5 * tokens
    metrics = engine.metrics
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (32 * 206, 31 * 192)
    assert metrics.prefix_cache_hit_rate == pytest.approx(31 * 192 / (32 * 206))
    without = make_engine("llama", max_num_seqs=32, max_num_batched_tokens=256, enable_prefix_caching=False)
    assert computed(without, prompts, params)[1] == sum(map(len, prompts))
    assert without.metrics.prefix_cache_queries == 0


def test_a_salt_keeps_tenants_apart(engine: Any, random_prompt: Any) -> None:
    prompt = random_prompt(40, 1)

    def cached(salt: str | None) -> int:
        engine.add_request(prompt, GREEDY, cache_salt=salt)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        return int(outputs[-1].num_cached_tokens)

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 32, 32, 32]


def test_a_cache_under_pressure_forgets_and_is_right(
    make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    """Ten prompts, two of which begin alike, through a pool that holds three of them, with preemptions."""
    engine = make_engine("llama", num_blocks=9, max_num_batched_tokens=24)
    prompts = [random_prompt(20 + seed, seed // 2) for seed in range(10)]
    for _ in range(2):
        completions = engine.generate(prompts, GREEDY)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.token_ids == reference_tokens("llama", prompt, 12)
    assert engine.metrics.prefix_cache_hits > 0
    assert engine.metrics.preemptions > 0


def test_what_an_interrupted_step_should_have_stored_is_not_found(
    engine: Any, reference_tokens: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(40, 4)

    def interrupted(batch: Any) -> None:
        raise KeyboardInterrupt

    engine.add_request(prompt, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert (engine.pool.num_cached, engine.pool.num_used) == (0, 0)
    tokens = []
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tuple(tokens) == reference_tokens("llama", prompt, 12)
    engine.reset_prefix_cache()


def test_a_failed_step_leaves_nothing_to_be_found(
    engine: Any, reference_tokens: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(40, 4)

    def broken(batch: Any) -> None:
        raise RuntimeError("no memory left")

    for _ in range(2):
        engine.add_request(prompt, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "forward", broken)
        assert [output.finish_reason for output in engine.step()] == ["error", "error"]
    assert engine.pool.num_free == engine.pool.num_usable
    assert engine.generate([prompt], GREEDY)[0].token_ids == reference_tokens("llama", prompt, 12)


def test_an_abort_before_the_first_token_keeps_what_others_computed(engine: Any, random_prompt: Any) -> None:
    shared = random_prompt(40, 4)
    engine.generate([shared], GREEDY)
    engine.scheduler._max_num_batched_tokens = 20
    try:
        name = engine.add_request(shared[:32] + random_prompt(60, 5), GREEDY)
        engine.step()
        engine.abort(name)
    finally:
        engine.scheduler._max_num_batched_tokens = engine.config.max_num_batched_tokens
    assert engine.generate([shared], GREEDY)[0].num_cached_tokens == 32


def test_the_cache_is_not_reset_under_a_running_request(engine: Any) -> None:
    from quantkit.errors import UsageError

    name = engine.add_request([5, 6], GREEDY)
    with pytest.raises(UsageError, match="1 requests are running"):
        engine.reset_prefix_cache()
    engine.abort(name)
    engine.reset_prefix_cache()
