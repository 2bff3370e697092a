"""From the logits of a step to what each request gets: its next token, log-probabilities, or an error."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.serve.batch import Batch
from quantkit.serve.logprobs import token_logprobs
from quantkit.serve.outputs import TokenLogprobs
from quantkit.serve.penalties import adjust_logits
from quantkit.serve.request import Request
from quantkit.serve.sampler import Draw, sample
from quantkit.serve.token_mask import mask_logits

LEAST_TOP_P = 1e-30  # a smaller one keeps the most likely token as well, and would be 0 in float32
NO_TOKEN = "no token may come next: structured, min_tokens and logit_bias together leave none"


@dataclass(frozen=True, slots=True)
class NextToken:
    """What a request gets.

    Attributes:
        request: the request.
        token_id: its next token; None if there is none.
        logprobs: of the token and the most likely ones, if asked for.
        error: why there is no token; None if the model's logits are not finite.
    """

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def choose_tokens(logits: Tensor, requests: Sequence[Request]) -> list[NextToken]:
    """The next token of each request.

    Args:
        logits: [R, V] as the model gives them.
        requests: R requests whose rows they are.
    """
    masked, errors = mask_logits(logits, requests)
    adjusted = adjust_logits(masked, requests)
    tokens = sample(adjusted, [_draw(request) for request in requests])
    if adjusted is not logits:
        for row, token in enumerate(tokens):
            if token is None and bool(torch.isfinite(logits[row].max())):
                errors.setdefault(row, NO_TOKEN)
    scored = [row for row, token in enumerate(tokens) if token is not None and _wants_logprobs(requests[row])]
    logprobs: dict[int, TokenLogprobs] = {}
    if scored:
        found = token_logprobs(
            logits[scored], [tokens[row] or 0 for row in scored], [requests[row].params.logprobs or 0 for row in scored]
        )
        logprobs = dict(zip(scored, found, strict=True))
    return [
        NextToken(request, None if row in errors else tokens[row], logprobs.get(row), errors.get(row))
        for row, request in enumerate(requests)
    ]


def score_prompts(batch: Batch, logits: Tensor) -> None:
    """Note the log-probabilities of the prompts of those requests that ask for them.

    Args:
        batch: the step.
        logits: [R + P, V], see `Batch.logits_indices`.
    """
    first_row = len(batch.sampled_rows)
    for index, first_token, count in batch.scored_tokens:
        request = batch.requests[index]
        assert request.prompt_logprobs is not None, "its tokens are scored because it asks for it"
        start = int(batch.positions[first_token]) + 1
        token_ids = request.token_ids[start : start + count]
        wanted = [request.params.prompt_logprobs or 0] * count
        request.prompt_logprobs[start : start + count] = token_logprobs(
            logits[first_row : first_row + count], token_ids, wanted
        )
        first_row += count


def _wants_logprobs(request: Request) -> bool:
    return request.params.logprobs is not None


def _draw(request: Request) -> Draw:
    params = request.params
    temperature = 0.0 if params.is_greedy else params.temperature
    return Draw(temperature, max(params.top_p, LEAST_TOP_P), request.generator, params.top_k, params.min_p)
