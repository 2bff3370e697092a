"""Structured output in a step: forbid the tokens that a form does not allow, and note what that changed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.serve.request import Request
from quantkit_kernels import apply_token_bitmask

BITS = 32


def mask_logits(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, dict[int, str]]:
    """Set the logits of forbidden tokens to -inf, and record per request what probability they had.

    Args:
        logits: [R, V] as the model gives them; unchanged.
        requests: whose rows they are.

    Returns:
        [R, V]: the same tensor if no request has a form, otherwise a float32 copy; and row -> what went wrong, for
        requests that cannot go on.
    """
    rows = [row for row, request in enumerate(requests) if request.matcher is not None]
    if not rows:
        return logits, {}
    errors: dict[int, str] = {}
    bitmask = torch.zeros(len(rows), -(-logits.shape[1] // BITS), dtype=torch.int32)
    for words, row in zip(bitmask, rows, strict=True):
        matcher = requests[row].matcher
        assert matcher is not None, "its row was chosen because it has one"
        try:
            matcher.fill(words)
        except Exception as error:
            # A matcher is third-party code; whatever it raises concerns its own request.
            errors[row] = f"{type(error).__name__}: {error}"
            words.zero_()
    unmasked = logits[rows].float()
    masked = unmasked.clone()
    apply_token_bitmask(masked, bitmask.to(masked.device))
    legal_masses = (masked.logsumexp(-1) - unmasked.logsumexp(-1)).exp().tolist()
    num_legal = (masked > float("-inf")).sum(-1).tolist()
    for row, mass, count in zip(rows, legal_masses, num_legal, strict=True):
        if row not in errors:
            total, number = requests[row].legal_masses
            requests[row].legal_masses = total + mass, number + 1
            requests[row].num_forced_tokens += count == 1
    changed = logits.to(torch.float32, copy=True)
    changed[rows] = masked
    return changed, errors
