"""From logits to the next tokens: greedy, or by temperature, min_p, top_k and top_p, with a request's own numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.serve.device import runs_triton
from quantkit.serve.device_sampler import MAX_TOP_K, sample_on_device

NUCLEUS_GUESS = 512  # most nuclei are smaller; a full sort of a vocabulary takes far longer than finding the top of it


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled.

    Attributes:
        temperature: 0 is greedy.
        top_p: mass of the nucleus.
        generator: random numbers; not used if greedy.
        top_k: most tokens; 0 is all.
        min_p: least probability, relative to the largest.
    """

    temperature: float
    top_p: float
    generator: torch.Generator | None
    top_k: int = 0
    min_p: float = 0.0


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
    if runs_triton(logits.device):
        return sample_on_device(logits, draws)
    peaks = logits.amax(dim=-1)  # NaN counts as the largest
    tokens = logits.float().numpy(force=True).argmax(-1)  # so it does here, at ten times torch's speed on a CPU
    is_valid = torch.isfinite(peaks).tolist()
    chosen: list[int | None] = [token if ok else None for token, ok in zip(tokens.tolist(), is_valid, strict=True)]
    rows = [index for index, draw in enumerate(draws) if draw.temperature > 0 and is_valid[index]]
    if not rows:
        return chosen
    temperature = torch.tensor([draws[index].temperature for index in rows], dtype=torch.float32)
    scores = (logits[rows].float() - peaks[rows].float().unsqueeze(1)) / temperature.unsqueeze(1)
    uniform = torch.stack([_uniform(draws[index]) for index in rows])
    limits = Limits.of([draws[index] for index in rows])
    probabilities = scores.softmax(-1)
    is_broken = probabilities[:, :1].isnan()  # one NaN makes the whole row so, which must not reach the other rows
    sampled = sample_probabilities(probabilities.masked_fill(is_broken, 1.0), limits, uniform)
    for index, token, is_none in zip(rows, sampled.tolist(), is_broken.flatten().tolist(), strict=True):
        chosen[index] = None if is_none else token
    return chosen


def _uniform(draw: Draw) -> Tensor:
    assert draw.generator is not None, "a request that is not greedy has a generator"
    return torch.rand((), generator=draw.generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Limits:
    """Which of the most likely tokens of each row may be drawn.

    Attributes:
        top_p: [R] float64 in (0, 1].
        top_k: [R] int64; 0 is all.
        min_p: [R] float32 in [0, 1].
    """

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> "Limits":
        """Those of some rows."""
        return cls(
            torch.tensor([draw.top_p for draw in draws], dtype=torch.float64),
            torch.tensor([min(draw.top_k, MAX_TOP_K) for draw in draws], dtype=torch.int64),
            torch.tensor([draw.min_p for draw in draws], dtype=torch.float32),
        )

    def __getitem__(self, rows: Tensor) -> "Limits":
        return Limits(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def sample_probabilities(probabilities: Tensor, limits: Limits, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row's tokens that may be drawn.

    Of the tokens with at least min_p times the largest probability the top_k most likely are kept, and of these the
    shortest list that has top_p of their mass.

    Args:
        probabilities: [R, V] float32.
        limits: of the R rows.
        uniform: [R] float64 in [0, 1).

    Returns:
        [R] int64 token ids.

    Source: top_p arXiv:1904.09751, section 3.1; min_p arXiv:2407.01082.
    """
    tokens = torch.empty(len(probabilities), dtype=torch.int64)
    vocab_size = probabilities.shape[1]
    whole = (limits.top_p >= 1) & (limits.top_k == 0) & (limits.min_p == 0)
    if bool(whole.any()):
        tokens[whole] = _invert(probabilities[whole].double().cumsum(-1), uniform[whole])
    sizes = limits.top_k.add(1).clamp(min=NUCLEUS_GUESS).clamp(max=vocab_size)
    for size in sizes[~whole].unique().tolist():  # topk orders equals by its size, so each row has its own
        rows = (~whole & (sizes == size)).nonzero().flatten()
        while len(rows):
            values, order = probabilities[rows].topk(size)
            kept, is_covered = _count_kept(values, limits[rows], vocab_size)
            done = rows[is_covered]
            mass = values[is_covered].double().cumsum(-1)
            nucleus = mass.minimum(mass.gather(1, kept[is_covered] - 1))  # flat behind the last that is kept
            tokens[done] = order[is_covered].gather(1, _invert(nucleus, uniform[done]).unsqueeze(1)).squeeze(1)
            rows = rows[~is_covered]
            size = vocab_size
    return tokens


def _count_kept(values: Tensor, limits: Limits, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How many of each row's largest probabilities may be drawn, [R, 1], and whether these values tell, [R]."""
    size = values.shape[1]
    kept = (values >= limits.min_p.unsqueeze(1) * values[:, :1]).sum(1, keepdim=True)
    kept = torch.where(limits.top_k.unsqueeze(1) > 0, kept.minimum(limits.top_k.unsqueeze(1)), kept)
    mass = values.double().cumsum(-1)
    is_cut = (kept < size) | (size == vocab_size)  # otherwise more may be kept than these
    is_all = (limits.top_k == 0) & (limits.min_p == 0)
    total = torch.where(is_all, torch.ones_like(mass[:, -1]), mass.gather(1, kept - 1).squeeze(1))
    target = (limits.top_p * total).unsqueeze(1)
    nucleus = ((mass - values) < target).sum(1, keepdim=True).clamp(min=1)  # a tiny top_p rounds the target to 0
    is_covered = torch.where(is_all, (mass[:, -1:] >= target).squeeze(1) | (size == vocab_size), is_cut.squeeze(1))
    return nucleus.minimum(kept), is_covered


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """[R] first column whose cumulative mass exceeds uniform * the whole mass."""
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)
