"""Log-probabilities of new tokens and of prompts against one full forward pass of transformers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.serve import SamplingParams
from quantkit.serve.logprobs import ROWS, token_logprobs


@pytest.fixture(scope="module")
def full_forward(tiny_models: Any) -> Callable[[list[int]], Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny_models("mistral"), dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def scores(token_ids: list[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return scores


def assert_entry(entry: Any, scores: Tensor, token: int, count: int) -> None:
    """An entry holds its token and the ``count`` most likely ones, with their scores and ranks."""
    order = scores.argsort(descending=True).tolist()
    assert list(entry) == list(dict.fromkeys([token, *order[:count]]))
    for other, (logprob, rank) in entry.items():
        assert math.isclose(logprob, scores[other].item(), abs_tol=2e-4)
        assert rank == order.index(other) + 1


@pytest.mark.parametrize("count", [0, 1, 5])
def test_new_tokens(count: int, make_engine: Any, full_forward: Any, random_prompt: Any) -> None:
    """The model's own, whatever temperature, penalties and bias make of them."""
    engine = make_engine("mistral")
    prompt = random_prompt(30, 1)
    params = SamplingParams(
        temperature=1.7, seed=3, max_tokens=20, ignore_eos=True, logprobs=count, repetition_penalty=1.5,
        logit_bias={9: 3.0}, top_k=50,
    )  # fmt: skip
    (completion,) = engine.generate([prompt], params)
    scores = full_forward([*prompt, *completion.token_ids])
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 20
    for place, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert_entry(entry, scores[len(prompt) - 1 + place], token, count)


def test_prompts_in_chunks_in_any_order_and_never_from_the_cache(
    make_engine: Any, full_forward: Any, random_prompt: Any
) -> None:
    engine = make_engine("mistral", max_num_batched_tokens=23)
    prompts = [random_prompt(length, 5) for length in (1, 2, 24, 60)]  # each is the beginning of the next
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=3)
    engine.generate(prompts, plain)  # now they are cached
    for order in (prompts, prompts[::-1]):
        for prompt, completion in zip(order, engine.generate(order, params), strict=True):
            assert completion.num_cached_tokens == 0
            assert completion.logprobs is None
            assert completion.prompt_logprobs is not None
            assert completion.prompt_logprobs[0] is None
            assert len(completion.prompt_logprobs) == len(prompt)
            scores = full_forward(prompt)
            for place in range(1, len(prompt)):
                assert_entry(completion.prompt_logprobs[place], scores[place - 1], prompt[place], 2)
    assert engine.generate([prompts[-1]], plain)[0].num_cached_tokens > 0  # others still use the cache


def test_a_request_that_is_preempted_before_its_first_token_scores_its_whole_prompt(
    make_engine: Any, full_forward: Any, random_prompt: Any
) -> None:
    engine = make_engine("mistral", num_blocks=8, max_num_batched_tokens=16)
    first = engine.add_request(random_prompt(10, 1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    prompt = random_prompt(80, 2)
    name = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    entries = None
    while engine.has_unfinished:
        scored = next((request for request in engine.unfinished if request.request_id == name), None)
        if scored is not None and scored.num_computed_tokens >= 32 and not scored.num_preemptions:
            engine.scheduler._preempt(scored)
        for output in engine.step():
            if output.request_id == name and output.prompt_logprobs is not None:
                assert entries is None  # given out once
                entries = output.prompt_logprobs
    assert first != name
    assert entries is not None
    scores = full_forward(prompt)
    for place in range(1, 80):
        assert_entry(entries[place], scores[place - 1], prompt[place], 0)
    engine.check_all_free()


def test_streamed_outputs_carry_the_logprobs_of_their_tokens(engine: Any, random_prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    (whole,) = engine.generate([random_prompt(5, 1)], params)
    engine.add_request(random_prompt(5, 1), params)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.logprobs is not None
            assert [token in entry for token, entry in zip(output.token_ids, output.logprobs, strict=True)] == [True]
            assert output.prompt_logprobs is None
    assert whole.logprobs is not None


def test_many_rows_are_what_they_are_alone() -> None:
    logits = torch.randn(ROWS + 3, 40, generator=torch.Generator().manual_seed(0))
    tokens = [row % 40 for row in range(len(logits))]
    counts = [row % 4 for row in range(len(logits))]
    together = token_logprobs(logits, tokens, counts)
    for row in (0, 1, ROWS - 1, ROWS, ROWS + 2):
        assert token_logprobs(logits[row : row + 1], [tokens[row]], [counts[row]]) == [together[row]]
        assert_entry(together[row], logits[row].log_softmax(-1), tokens[row], counts[row])
