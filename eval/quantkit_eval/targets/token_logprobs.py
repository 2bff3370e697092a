"""Log-probabilities of a prompt's tokens from a server, if it gives exactly those; otherwise nothing, never a guess."""

import math
from collections.abc import Sequence
from typing import Any

from quantkit_eval.targets.http_requests import HttpRequests, Json

NO_PROBABILITY = -9999.0  # what servers write for -inf, which JSON lacks
ROUNDING = 1e-4  # a log-probability that is above 0 by more is none


def score_with_prompt_logprobs(
    http: HttpRequests, url: str, model: str, token_ids: Sequence[int]
) -> list[float] | None:
    """As vLLM has it: an entry {token id: {"logprob": number}} for each token of the prompt, null for the first.

    Returns:
        [T - 1] of T tokens; None if the server gives something else.
    """
    choice = _first_choice(http, url, _body(model, token_ids, prompt_logprobs=0))
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids) or entries[0] is not None:
        return None
    found = [
        entry.get(str(token_id)) if isinstance(entry, dict) else None
        for token_id, entry in zip(token_ids[1:], entries[1:], strict=True)
    ]
    return _numbers([entry.get("logprob") if isinstance(entry, dict) else None for entry in found])


def score_with_echo(http: HttpRequests, url: str, model: str, token_ids: Sequence[int]) -> list[float] | None:
    """As OpenAI had it: the prompt comes back before the new token, both with log-probabilities.

    Returns:
        [T - 1] of T tokens; None if the server gives something else, or another number of tokens.
    """
    choice = _first_choice(http, url, _body(model, token_ids, echo=True, logprobs=1))
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list) or len(values) != len(token_ids) + 1 or values[0] is not None:
        return None
    return _numbers(values[1 : len(token_ids)])


def _body(model: str, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, **more}


def _first_choice(http: HttpRequests, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Empty if the server gives no choice."""
    answer: Json = http.post(url, body)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _numbers(values: Sequence[object]) -> list[float] | None:
    """The values, if each is a log-probability."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != len(values) or not all(NO_PROBABILITY < value <= ROUNDING for value in numbers):
        return None
    return numbers if all(map(math.isfinite, numbers)) else None
