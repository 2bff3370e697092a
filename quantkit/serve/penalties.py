"""Changes to logits before a token is chosen: what must not come, what is pushed, and penalties for repeating."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.serve.request import Request


class TokenCounts:
    """How often each token occurs in a request, kept up to date token by token.

    Args:
        prompt_token_ids: of the request.
        vocab_size: V.

    Attributes:
        output: [V] int32, occurrences in the continuation.
        seen: [V] bool, whether it occurs in prompt or continuation.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self.output = torch.zeros(vocab_size, dtype=torch.int32)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.seen[torch.tensor(prompt_token_ids)] = True

    def add(self, token_id: int) -> None:
        """Count a new token."""
        self.output[token_id] += 1
        self.seen[token_id] = True


def adjust_logits(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply min_tokens, logit_bias and the penalties, in this order.

    Args:
        logits: [R, V]; unchanged.
        requests: whose rows they are.

    Returns:
        [R, V]: the same tensor if nothing applies, otherwise a float32 copy.
    """
    ended = [_forbidden(request) for request in requests]
    biases = [request.params.logit_bias for request in requests]
    counted = [row for row, request in enumerate(requests) if request.counts is not None]
    if not (counted or any(ended) or any(biases)):
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    if any(ended):
        rows, columns = zip(*((row, token) for row, tokens in enumerate(ended) for token in tokens), strict=True)
        adjusted[list(rows), list(columns)] = float("-inf")
    if any(biases):
        added = [(row, token, value) for row, bias in enumerate(biases) for token, value in bias.items()]
        rows, columns, values = zip(*added, strict=True)
        adjusted[list(rows), list(columns)] += torch.tensor(values, dtype=torch.float32, device=adjusted.device)
    if counted:
        adjusted[counted] = _penalize(adjusted[counted], [requests[row] for row in counted])
    return adjusted


def _forbidden(request: Request) -> frozenset[int]:
    """Tokens that would end a request too early; a form that is complete ends it all the same."""
    is_complete = request.matcher is not None and request.matcher.is_finished
    return frozenset() if request.may_stop or is_complete else request.stop_token_ids


def _penalize(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """[R, V] logits less what repeating costs.

    Source: repetition arXiv:1909.05858, section 4.1; frequency and presence as in OpenAI's API.
    """
    counts = [request.counts for request in requests if request.counts is not None]
    output = torch.stack([count.output for count in counts]).to(logits.device)
    seen = torch.stack([count.seen for count in counts]).to(logits.device)
    repetition, frequency, presence = (
        torch.tensor(
            [[getattr(request.params, name)] for request in requests], dtype=torch.float32, device=logits.device
        )
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - frequency * output - presence * (output > 0)
