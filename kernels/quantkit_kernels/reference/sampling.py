"""sample_tokens and apply_token_bitmask: from logits to the next token of each row.

A token's probability relative to the row's most likely one is rounded to a whole number of 2**-40, by whole-number
arithmetic alone. Sums are then exact in any order, so that a row's token depends on its logits, its parameters and its
random number, and not on the device, the body or the other rows.
"""

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import FLOATING, check_argument

LOG2_E = 1.4426950408889634
MASS_BITS = 40  # a weight of 1 is 2**40 units of mass
FRACTION_BITS = 23  # of an exponent in fixed point; also of a float32
LEAST_EXPONENT = -64  # 2**-64 has no mass
# 2**f on [0, 1] as a polynomial in f, lowest power first, in units of 2**-30: least squares of the relative error with
# 1 at 0 and 2 at 1, so that octaves meet; off by 1e-7 at most.
EXP2_COEFFICIENTS = (1073741824, 744266003, 257869505, 59932748, 9657144, 2016424)
BITS_PER_WORD = 32


def check_sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `sample_tokens` fit together."""
    check_argument("logits", logits, FLOATING, ("R", "V"))
    if not logits.shape[1]:
        raise ValueError("logits has no column, allowed is 1 or more")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("uniform", uniform, torch.float64),
    ):
        check_argument(name, tensor, (dtype,), (logits.shape[0],), logits.device)


def relative_probability(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] float32 exp((logit - largest logit) / temperature), the same to the bit wherever it is computed.

    Float operations stand alone (no product meets a sum, so that none can be fused); the exponential is whole numbers.
    Right to a relative 3e-7, beside what rounding the exponent to 24 bits costs.
    """
    wide = logits.float()
    exponent = ((wide - wide.amax(1, keepdim=True)) / temperature.unsqueeze(1)) * LOG2_E
    fixed = torch.floor(exponent.clamp(min=LEAST_EXPONENT) * 2.0**FRACTION_BITS).to(torch.int64)
    whole, fraction = fixed >> FRACTION_BITS, fixed & (2**FRACTION_BITS - 1)
    power = torch.full_like(fixed, EXP2_COEFFICIENTS[-1])
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        power = coefficient + ((power * fraction) >> FRACTION_BITS)  # 2**30 to 2**31
    mantissa = (power >> (30 - FRACTION_BITS)) - 2**FRACTION_BITS
    return (((whole + 127) << FRACTION_BITS) + mantissa).to(torch.int32).view(torch.float32)


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Draw one token a row.

    Tokens are ordered by probability, equal ones by number. Of those with at least ``min_p`` times the largest
    probability the first ``top_k`` are kept, of these the fewest that hold ``top_p`` of their mass; the token is where
    the kept mass, summed up by token number, exceeds ``uniform`` times its whole.

    Args:
        logits: [R, V], unit stride along V, float32, bfloat16 or float16; -inf is never drawn.
        temperature: [R] float32; 0 is the largest logit, of equal ones the first.
        top_k: [R] int32; 0 is all.
        top_p: [R] float32 in (0, 1]; 1 is all.
        min_p: [R] float32 in [0, 1]; 0 is all.
        uniform: [R] float64 in [0, 1).

    Returns:
        [R] int64; -1 where the logits hold NaN or +inf or only -inf, so that there is no distribution.

    Precision: exact, except that tokens below 2**-40 of the largest probability have none.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.

    Source: min_p arXiv:2407.01082, top_p arXiv:1904.09751, section 3.1.
    """
    check_sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    peak, greedy = logits.float().max(1)  # NaN counts as the largest
    greedy = (logits == peak.to(logits.dtype).unsqueeze(1)).int().argmax(1)  # the first
    is_drawn = (temperature > 0) & torch.isfinite(peak)
    safe = torch.where(is_drawn, temperature, torch.ones_like(temperature))
    probability = relative_probability(torch.where(is_drawn.unsqueeze(1), logits, torch.zeros_like(logits)), safe)
    ordered, order = probability.sort(dim=1, descending=True, stable=True)
    mass = (ordered * 2.0**MASS_BITS).to(torch.int64)
    rank = torch.arange(mass.shape[1], device=mass.device)
    most = torch.where(top_k > 0, top_k, mass.shape[1]).unsqueeze(1)
    mass = mass.masked_fill((ordered < min_p.unsqueeze(1)) | (rank >= most), 0)
    before = mass.cumsum(1) - mass
    target = (mass.sum(1).double() * top_p.double()).to(torch.int64).clamp_(min=1)
    mass = mass.masked_fill((before >= target.unsqueeze(1)) & (top_p < 1).unsqueeze(1), 0)
    cumulative = torch.zeros_like(mass).scatter_(1, order, mass).cumsum(1)
    total = cumulative[:, -1]
    drawn = torch.minimum((uniform * total.double()).to(torch.int64), total - 1).clamp_(min=0)
    token = torch.searchsorted(cumulative, drawn.unsqueeze(1), right=True).squeeze(1)
    return torch.where(is_drawn, token, greedy).masked_fill_(~torch.isfinite(peak), -1)


def check_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `apply_token_bitmask` fit together."""
    check_argument("logits", logits, FLOATING, ("R", "V"))
    words = -(-logits.shape[1] // BITS_PER_WORD)
    check_argument("bitmask", bitmask, (torch.int32,), (logits.shape[0], words), logits.device)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [R, V], unit stride along V, float32, bfloat16 or float16.
        bitmask: [R, ceil(V / 32)] int32: token t is allowed if bit t % 32 of word t // 32 is 1.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_token_bitmask(logits, bitmask)
    shifts = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=logits.device)
    is_allowed = ((bitmask.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~is_allowed, float("-inf"))
