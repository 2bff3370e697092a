"""From logits to the next tokens: greedy, or by temperature and top-p with each request's own random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUCLEUS_GUESS = 512  # most nuclei are smaller; a full sort of a vocabulary takes far longer than finding the top of it


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled.

    Attributes:
        temperature: 0 is greedy.
        top_p: mass of the nucleus.
        generator: random numbers; not used if greedy.
    """

    temperature: float
    top_p: float
    generator: torch.Generator | None


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row.

    A row's result depends on its logits and its generator alone, not on the other rows: one uniform number in [0, 1)
    is drawn for each token and inverted through the cumulative distribution.

    Args:
        logits: [R, V] in the model's dtype.
        draws: R of them.

    Returns:
        R token ids; None where the logits hold NaN or +inf, so that there is no distribution.
    """
    peaks, tokens = logits.max(dim=-1)  # NaN counts as the largest
    is_valid = torch.isfinite(peaks).tolist()
    chosen: list[int | None] = [token if ok else None for token, ok in zip(tokens.tolist(), is_valid, strict=True)]
    rows = [index for index, draw in enumerate(draws) if draw.temperature > 0 and is_valid[index]]
    if not rows:
        return chosen
    temperature = torch.tensor([draws[index].temperature for index in rows], dtype=torch.float32)
    scores = (logits[rows].float() - peaks[rows].float().unsqueeze(1)) / temperature.unsqueeze(1)
    uniform = torch.stack([_uniform(draws[index]) for index in rows])
    top_p = torch.tensor([draws[index].top_p for index in rows], dtype=torch.float64)
    sampled = sample_probabilities(scores.softmax(-1), top_p, uniform)
    for index, token in zip(rows, sampled.tolist(), strict=True):
        chosen[index] = token
    return chosen


def _uniform(draw: Draw) -> Tensor:
    assert draw.generator is not None, "a request that is not greedy has a generator"
    return torch.rand((), generator=draw.generator, dtype=torch.float64)


def sample_probabilities(probabilities: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row's nucleus.

    The nucleus is the shortest list of most likely tokens whose probabilities reach top_p.

    Args:
        probabilities: [R, V] float32.
        top_p: [R] float64 in (0, 1].
        uniform: [R] float64 in [0, 1).

    Returns:
        [R] int64 token ids.

    Source: arXiv:1904.09751, section 3.1.
    """
    tokens = torch.empty(len(probabilities), dtype=torch.int64)
    whole = top_p >= 1
    if bool(whole.any()):
        tokens[whole] = _invert(probabilities[whole].double().cumsum(-1), uniform[whole])
    size = min(NUCLEUS_GUESS, probabilities.shape[1])
    rows = (~whole).nonzero().flatten()
    while len(rows):
        values, order = probabilities[rows].topk(size)
        mass = values.double().cumsum(-1)
        is_covered = (mass[:, -1] >= top_p[rows]) | (size == probabilities.shape[1])
        done = rows[is_covered]
        before = mass[is_covered] - values[is_covered]
        kept = (before < top_p[done].unsqueeze(1)).sum(1, keepdim=True)  # at least the first
        nucleus = mass[is_covered].minimum(mass[is_covered].gather(1, kept - 1))  # flat behind the nucleus
        tokens[done] = order[is_covered].gather(1, _invert(nucleus, uniform[done]).unsqueeze(1)).squeeze(1)
        rows = rows[~is_covered]
        size = probabilities.shape[1]
    return tokens


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """[R] first column whose cumulative mass exceeds uniform * the whole mass."""
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
