"""The engine's greedy tokens are those of transformers' generate, for every family and however requests are mixed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quantkit.serve import SamplingParams

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral")
LENGTHS = (1, 5, 33, 16, 60, 17, 2)  # the sliding windows of the tiny models are 24
COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT)


@pytest.fixture(params=["quantkit", "transformers"])
def make_engine(request: pytest.FixtureRequest, make_engine: Any) -> Any:
    """Engines over our own decoder, and over transformers' definition."""
    return partial(make_engine, definition=request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family: str, make_engine: Any, reference_tokens: Any, random_prompt: Any) -> None:
    engine = make_engine(family)
    for seed, length in enumerate(LENGTHS):
        prompt = random_prompt(length, seed)
        (completion,) = engine.generate([prompt], GREEDY)
        assert completion.token_ids == reference_tokens(family, prompt, COUNT)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_batch_with_chunked_prefill(
    family: str, make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    """Chunks of prompts and decoded tokens share steps of 9 tokens; requests join while others run."""
    engine = make_engine(family, max_num_batched_tokens=9, max_num_seqs=4)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    mixed = False
    names = []
    done: dict[str, list[int]] = {}
    while len(names) < len(prompts) or engine.has_unfinished:
        if len(names) < len(prompts):
            names.append(engine.add_request(prompts[len(names)], GREEDY))
            done[names[-1]] = []
        gaps = [request.num_tokens - request.num_computed_tokens for request in engine.scheduler.running]
        mixed |= 1 in gaps and max(gaps) > 1
        for output in engine.step():
            done[output.request_id] += output.token_ids
    assert mixed
    assert [tuple(done[name]) for name in names] == [reference_tokens(family, prompt, COUNT) for prompt in prompts]
    engine.check_all_free()


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_pool_so_small_that_requests_wait_and_are_preempted(
    family: str, make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    engine = make_engine(family, max_num_batched_tokens=24, num_blocks=8)  # 7 blocks of 16: 112 tokens
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    before = engine.scheduler.num_preemptions
    names = [engine.add_request(prompt, GREEDY, stream=False) for prompt in prompts]
    waited = 0
    done: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished:
        for output in engine.step():
            done[output.request_id] += output.token_ids
        waited = max(waited, len(engine.scheduler.waiting))
    assert waited >= 2
    assert engine.scheduler.num_preemptions > before
    assert [tuple(done[name]) for name in names] == [reference_tokens(family, prompt, COUNT) for prompt in prompts]
    engine.check_all_free()


@pytest.mark.parametrize("kv_block_size", [1, 7, 256])
def test_with_other_block_sizes(
    kv_block_size: int, make_engine: Any, reference_tokens: Any, random_prompt: Any
) -> None:
    engine = make_engine("gemma3", kv_block_size=kv_block_size, max_num_batched_tokens=20)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    completions = engine.generate(prompts, GREEDY)
    wanted = [reference_tokens("gemma3", prompt, COUNT) for prompt in prompts]
    assert [completion.token_ids for completion in completions] == wanted


@pytest.mark.parametrize("split", [1, 8, 15, 16, 17, 24, 25, 39])
def test_a_prompt_cut_anywhere(split: int, make_engine: Any, reference_tokens: Any, random_prompt: Any) -> None:
    """A second chunk sees the first one in the cache, at the right places and through the window."""
    engine = make_engine("mistral")
    prompt = random_prompt(40, 5)
    name = engine.add_request(prompt, GREEDY)
    engine.scheduler._max_num_batched_tokens = split
    try:
        engine.step()
    finally:
        engine.scheduler._max_num_batched_tokens = engine.config.max_num_batched_tokens
    tokens: list[int] = []
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids if output.request_id == name]
    assert tuple(tokens) == reference_tokens("mistral", prompt, COUNT)


@pytest.mark.parametrize("family", FAMILIES)
def test_score_is_a_plain_forward(family: str, make_engine: Any, tiny_models: Any, random_prompt: Any) -> None:
    from transformers import AutoModelForCausalLM

    token_ids = random_prompt(50, 9)
    model = AutoModelForCausalLM.from_pretrained(tiny_models(family), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    engine = make_engine(family)
    scores = engine.score(token_ids)
    assert scores.dtype == torch.float32
    assert scores.shape == (50, 320)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)  # float32 sums in another order, over two blocks
    torch.testing.assert_close(scores.logsumexp(-1), torch.zeros(50), rtol=0, atol=1e-5)
    engine.check_all_free()


def test_scoring_leaves_running_requests_alone(make_engine: Any, reference_tokens: Any, random_prompt: Any) -> None:
    engine = make_engine("llama")
    prompt = random_prompt(20, 1)
    engine.add_request(prompt, GREEDY)
    tokens: list[int] = []
    score: Callable[[], torch.Tensor] = lambda: engine.score(random_prompt(70, 2))  # noqa: E731
    first = score()
    while engine.has_unfinished:
        tokens += [token for output in engine.step() for token in output.token_ids]
        assert torch.equal(score(), first)
    assert tuple(tokens) == reference_tokens("llama", prompt, COUNT)
