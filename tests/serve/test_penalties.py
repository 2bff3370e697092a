"""Changes to logits against transformers' processors, and written out where transformers has none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from quantkit.serve.penalties import TokenCounts, adjust_logits
from quantkit.serve.request import Request
from quantkit.serve.sampling_params import SamplingParams

VOCAB = 50


def request(prompt: list[int], output: list[int], **settings: Any) -> Request:
    params = SamplingParams(max_tokens=100, **settings)
    counts = TokenCounts(prompt, VOCAB) if params.counts_tokens else None
    made = Request("a", tuple(prompt), params, 100, frozenset({3, 9}), None, None, counts=counts)
    for token in output:
        made.append_token(token)
    return made


def logits(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


def test_nothing_is_copied_where_nothing_applies() -> None:
    scores = logits(2)
    assert adjust_logits(scores, [request([1], [2]), request([4], [5], min_tokens=1)]) is scores


@pytest.mark.parametrize("penalty", [1.3, 0.5])
def test_repetition_is_transformers(penalty: float) -> None:
    prompt, output = [1, 2, 2, 7], [7, 30, 31, 30]
    processor: LogitsProcessor = RepetitionPenaltyLogitsProcessor(penalty)
    wanted = processor(torch.tensor([prompt + output]), logits(1))
    found = adjust_logits(logits(1), [request(prompt, output, repetition_penalty=penalty)])
    torch.testing.assert_close(found, wanted)


def test_frequency_and_presence_count_new_tokens_only() -> None:
    found = adjust_logits(logits(1), [request([1, 2, 2], [7, 30, 7], frequency_penalty=0.5, presence_penalty=-0.25)])
    wanted = logits(1)
    wanted[0, 7] += 0.25 - 2 * 0.5
    wanted[0, 30] += 0.25 - 0.5
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("num_output", [0, 2, 3])
def test_min_tokens_is_transformers(num_output: int) -> None:
    output = [5] * num_output
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [3, 9], device="cpu")
    wanted = processor(torch.tensor([[1, 2, *output]]), logits(1))
    assert torch.equal(adjust_logits(logits(1), [request([1, 2], output, min_tokens=3)]), wanted)


def test_bias_is_added_to_its_tokens() -> None:
    found = adjust_logits(logits(2), [request([1], [], logit_bias={4: 2.5, 0: -100}), request([1], [])])
    wanted = logits(2)
    wanted[0, 4] += 2.5
    wanted[0, 0] -= 100
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_kinds_together_are_what_they_are_alone(dtype: torch.dtype) -> None:
    """And the logits that come in are left as they are, for log-probabilities are taken from them."""
    requests = [
        request([1], []),
        request([1, 5], [5, 8], repetition_penalty=1.2),
        request([2], [], min_tokens=4),
        request([2], [2, 2], frequency_penalty=1, logit_bias={2: 50}),
        request([3], [8], presence_penalty=2, min_tokens=2, logit_bias={3: 100}),
    ]
    scores = logits(5, dtype)
    together = adjust_logits(scores, requests)
    assert torch.equal(scores, logits(5, dtype))
    assert together.dtype is torch.float32
    for row, one in enumerate(requests):
        assert torch.equal(adjust_logits(scores[row : row + 1], [one])[0].float(), together[row])
    assert together[4, 3] == float("-inf")  # a bias does not let a text end too early


def test_a_complete_form_may_end_before_min_tokens() -> None:
    class Finished:
        is_finished = True

    early = request([1], [], min_tokens=4)
    early.matcher = Finished()  # type: ignore[assignment]
    assert adjust_logits(logits(1), [early])[0, 3] == logits(1)[0, 3]
