"""The next tokens of a step whose logits lie on a device: drawn there, so that only tokens are copied back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit_kernels import sample_tokens

if TYPE_CHECKING:
    from quantkit.serve.sampler import Draw

MAX_TOP_K = 2**31 - 1


def sample_on_device(logits: Tensor, draws: Sequence["Draw"]) -> list[int | None]:
    """The next token of each row; arguments and result as `quantkit.serve.sampler.sample`.

    One copy brings the numbers of all rows to the device, one brings the tokens back.
    """
    rows = [(draw.temperature, min(draw.top_k, MAX_TOP_K), draw.top_p, draw.min_p, _uniform(draw)) for draw in draws]
    numbers = torch.tensor(rows, dtype=torch.float64, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
    temperature, top_k, top_p, min_p, uniform = numbers.T.contiguous()
    tokens = sample_tokens(logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), uniform)
    return [token if token >= 0 else None for token in tokens.tolist()]


def _uniform(draw: "Draw") -> float:
    """The row's own number; none is drawn for a greedy one."""
    if draw.temperature == 0:
        return 0.0
    assert draw.generator is not None, "a request that is not greedy has a generator"
    return float(torch.rand((), generator=draw.generator, dtype=torch.float64))
