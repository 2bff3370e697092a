"""Log-probabilities of tokens and of the most likely ones beside them, of many rows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.serve.outputs import TokenLogprobs

ROWS = 256  # made into float32 log-probabilities at a time


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What each row's token has, and the row's most likely ones.

    Args:
        logits: [R, V] as the model gives them.
        token_ids: R tokens.
        counts: how many of the most likely ones to add, for each row; 0 or more.

    Returns:
        R times token id -> (log-probability, rank), rank 1 for the most likely; the row's token is in front.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS):
        rows = slice(start, start + ROWS)
        found += _of_rows(logits[rows], token_ids[rows], counts[rows])
    return found


def _of_rows(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    scores = torch.log_softmax(logits.float(), dim=-1)
    own = scores.gather(1, torch.tensor(token_ids, device=scores.device).unsqueeze(1))
    ranks = ((scores > own).sum(1) + 1).tolist()
    values, tokens = scores.topk(min(max(counts), scores.shape[1]))
    rows = zip(token_ids, own.squeeze(1).tolist(), ranks, tokens.tolist(), values.tolist(), counts, strict=True)
    entries: list[TokenLogprobs] = []
    for token_id, score, rank, best, best_scores, count in rows:
        entry = {token_id: (score, rank)}
        for place, (other, other_score) in enumerate(zip(best[:count], best_scores[:count], strict=True)):
            entry.setdefault(other, (other_score, place + 1))
        entries.append(entry)
    return entries
