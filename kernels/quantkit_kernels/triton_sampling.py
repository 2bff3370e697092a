"""Triton bodies of sample_tokens and apply_token_bitmask.

Nothing is sorted: a kept set is all tokens above a threshold and the first few at it, and the threshold is found by
halving the range of bit patterns, whose order is that of the probabilities. One program does a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_sample_tokens, check_token_bitmask, sampling

BLOCK = 4096
NUM_WARPS = 16
MASK_BLOCK = 4096
MASK_WARPS = 8

_LOG2_E = tl.constexpr(sampling.LOG2_E)
_MASS = tl.constexpr(2.0**sampling.MASS_BITS)
_FRACTION_BITS = tl.constexpr(sampling.FRACTION_BITS)
_FRACTION = tl.constexpr(2**sampling.FRACTION_BITS)
_LEAST_EXPONENT = tl.constexpr(float(sampling.LEAST_EXPONENT))
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(number) for number in sampling.EXP2_COEFFICIENTS)
_ABOVE_ONE = tl.constexpr(0x3F800001)  # the bit pattern behind that of 1.0


@triton.jit
def _relative_probability(logit, peak, temperature):  # type: ignore[no-untyped-def]
    """Bit patterns of `sampling.relative_probability`; every float operation stands alone."""
    exponent = tl.math.div_rn(logit - peak, tl.broadcast_to(temperature, logit.shape)) * _LOG2_E
    exponent = tl.maximum(exponent, _LEAST_EXPONENT)
    fixed = tl.floor(exponent * _FRACTION).to(tl.int32)
    fraction = (fixed & (_FRACTION - 1)).to(tl.int64)
    power = fraction * 0 + _C5
    power = _C4 + ((power * fraction) >> _FRACTION_BITS)
    power = _C3 + ((power * fraction) >> _FRACTION_BITS)
    power = _C2 + ((power * fraction) >> _FRACTION_BITS)
    power = _C1 + ((power * fraction) >> _FRACTION_BITS)
    power = _C0 + ((power * fraction) >> _FRACTION_BITS)
    mantissa = (power >> (30 - _FRACTION_BITS)).to(tl.int32) - _FRACTION
    return (((fixed >> _FRACTION_BITS) + 127) << _FRACTION_BITS) + mantissa


@triton.jit
def _mass(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.float32, bitcast=True) * _MASS).to(tl.int64)


@triton.jit
def _find_peak(logits_ptr, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(largest logit, its first place, whether a logit is NaN)."""
    place = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        logit = tl.load(logits_ptr + start + place, mask=start + place < V, other=float("-inf")).to(tl.float32)
        where = tl.where(logit > best, start + place, where)
        best = tl.maximum(best, logit)
        nan |= (logit != logit).to(tl.int32)
    peak = tl.max(best, axis=0)
    return peak, tl.min(tl.where(best == peak, where, V), axis=0), tl.max(nan, axis=0)


@triton.jit
def _weigh(logits_ptr, bits_ptr, peak, temperature, least, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the bit patterns of a row; (number, mass) of the tokens with at least ``least``."""
    place = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        mask = start + place < V
        logit = tl.load(logits_ptr + start + place, mask=mask, other=float("-inf")).to(tl.float32)
        bits = _relative_probability(logit, peak, temperature)
        tl.store(bits_ptr + start + place, bits, mask=mask)
        is_kept = mask & (bits >= least)
        number += is_kept.to(tl.int32)
        mass += tl.where(is_kept, _mass(bits), 0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _find_threshold(  # type: ignore[no-untyped-def]
    bits_ptr, V, target, low, number_low, mass_low, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Where the most likely tokens reach ``target`` tokens (or mass), which those from ``low`` on do.

    There are ``number_low`` tokens of ``mass_low`` from ``low`` on. Returns low, high, few, number, mass: kept are all
    tokens from high on and the first ``few`` of those in low .. high - 1, which are equally likely; ``number`` tokens
    of ``mass`` in all.
    """
    high = tl.full([], _ABOVE_ONE, tl.int32)
    number_high = tl.zeros([], tl.int32)
    mass_high = tl.zeros([], tl.int64)
    place = tl.arange(0, BLOCK)
    while (high - low > 1) & (number_low - number_high > 1):
        middle = low + (high - low) // 2
        numbers = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            bits = tl.load(bits_ptr + start + place, mask=start + place < V, other=0)
            numbers += (bits >= middle).to(tl.int32)
            masses += tl.where(bits >= middle, _mass(bits), 0)
        number = tl.sum(numbers, axis=0)
        mass = tl.sum(masses, axis=0)
        is_enough = (mass if BY_MASS else number) >= target
        low = tl.where(is_enough, middle, low)
        number_low = tl.where(is_enough, number, number_low)
        mass_low = tl.where(is_enough, mass, mass_low)
        high = tl.where(is_enough, high, middle)
        number_high = tl.where(is_enough, number_high, number)
        mass_high = tl.where(is_enough, mass_high, mass)
    each = (mass_low - mass_high) // (number_low - number_high)
    few = ((target - mass_high + each - 1) // each).to(tl.int32) if BY_MASS else target - number_high
    return low, high, few, number_high + few, mass_high + few * each


@triton.jit
def _draw(bits_ptr, V, low, high, few, drawn, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token at which the mass of the kept ones, by place, exceeds ``drawn``."""
    place = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int64)
    ties = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    token = tl.full([], -1, tl.int32)
    while (token < 0) & (start < V):
        bits = tl.load(bits_ptr + start + place, mask=start + place < V, other=0)
        is_tie = ((bits >= low) & (bits < high)).to(tl.int32)
        rank = ties + tl.cumsum(is_tie, axis=0)
        is_kept = (bits >= high) | ((is_tie > 0) & (rank <= few))
        mass = before + tl.cumsum(tl.where(is_kept, _mass(bits), 0), axis=0)
        first = tl.min(tl.where(mass > drawn, place, BLOCK), axis=0)
        token = tl.where(first < BLOCK, start + first, -1)
        before = tl.max(mass, axis=0)
        ties = tl.max(rank, axis=0)
        start += BLOCK
    return token


@triton.jit
def _sample_tokens_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    bits_ptr,
    tokens_ptr,
    V,
    stride_logits,
    stride_bits,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    bits_ptr += row * stride_bits
    temperature = tl.load(temperature_ptr + row)
    peak, token, has_nan = _find_peak(logits_ptr, V, BLOCK)
    is_valid = (has_nan == 0) & (peak < float("inf")) & (peak > float("-inf"))
    if is_valid & (temperature > 0):
        low = tl.load(min_p_ptr + row).to(tl.int32, bitcast=True)
        number, mass = _weigh(logits_ptr, bits_ptr, peak, temperature, low, V, BLOCK)
        tl.debug_barrier()  # the patterns are read by other threads than wrote them
        high = low
        few = tl.zeros([], tl.int32)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < number):
            low, high, few, number, mass = _find_threshold(bits_ptr, V, top_k, low, number, mass, False, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            target = tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
            low, high, few, number, mass = _find_threshold(bits_ptr, V, target, low, number, mass, True, BLOCK)
        drawn = (tl.load(uniform_ptr + row) * mass.to(tl.float64)).to(tl.int64)
        token = _draw(bits_ptr, V, low, high, few, tl.minimum(drawn, mass - 1), BLOCK)
    tl.store(tokens_ptr + row, tl.where(is_valid, token, -1).to(tl.int64))


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Launch the Triton kernel; arguments and result as `quantkit_kernels.reference.sample_tokens`.

    Precision: the reference's token, always.
    Needs: unit stride along V; any stride along R; 4 bytes of scratch a logit.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_sample_tokens(logits, temperature, top_k, top_p, min_p, uniform)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    bits = torch.empty(num_rows, _scratch_stride(vocab_size), dtype=torch.int32, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else torch.device("cpu"):
        _sample_tokens_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            uniform,
            bits,
            tokens,
            vocab_size,
            logits.stride(0),
            bits.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return tokens


def _scratch_stride(vocab_size: int) -> int:
    return triton.cdiv(vocab_size, 16) * 16


@triton.jit
def _apply_token_bitmask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bitmask_ptr, V, num_words, stride_logits, stride_bitmask, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    word = first // 32 + tl.arange(0, BLOCK // 32)
    words = tl.load(bitmask_ptr + row * stride_bitmask + word, mask=word < num_words, other=0)
    is_allowed = ((words[:, None] >> tl.arange(0, 32)[None, :]) & 1).reshape(BLOCK)
    place = first + tl.arange(0, BLOCK)
    logits_ptr += row * stride_logits
    logit = tl.load(logits_ptr + place, mask=place < V)
    tl.store(logits_ptr + place, tl.where(is_allowed == 1, logit, float("-inf")).to(logit.dtype), mask=place < V)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Launch the Triton kernel; arguments and effect as `quantkit_kernels.reference.apply_token_bitmask`.

    Needs: unit stride along V and along the words; any stride along R.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_token_bitmask(logits, bitmask)
    num_rows, vocab_size = logits.shape
    if not logits.numel():
        return
    with torch.cuda.device(logits.device) if logits.is_cuda else torch.device("cpu"):
        _apply_token_bitmask_kernel[(num_rows, triton.cdiv(vocab_size, MASK_BLOCK))](
            logits,
            bitmask,
            vocab_size,
            bitmask.shape[1],
            logits.stride(0),
            bitmask.stride(0),
            BLOCK=MASK_BLOCK,
            num_warps=MASK_WARPS,
        )


def _sample_launch(label: str, rows: int, vocab_size: int, logits: str) -> Launch:
    types = {
        "logits_ptr": f"*{logits}", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32", "uniform_ptr": "*fp64", "bits_ptr": "*i32", "tokens_ptr": "*i64",
    }  # fmt: skip
    constexprs: dict[str, object] = {"BLOCK": BLOCK}
    return Launch(
        op="sample_tokens",
        label=label,
        kernel=_sample_tokens_kernel,
        signature=signature_of(_sample_tokens_kernel, types, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=rows * vocab_size * (2 if logits == "bf16" else 4),
        flops=0,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=(*types, "V", "stride_logits", "stride_bits"),
    )


def _mask_launch(label: str, rows: int, vocab_size: int) -> Launch:
    types = {"logits_ptr": "*bf16", "bitmask_ptr": "*i32"}
    constexprs: dict[str, object] = {"BLOCK": MASK_BLOCK}
    return Launch(
        op="apply_token_bitmask",
        label=label,
        kernel=_apply_token_bitmask_kernel,
        signature=signature_of(_apply_token_bitmask_kernel, types, constexprs),
        constexprs=constexprs,
        num_warps=MASK_WARPS,
        num_stages=3,
        bytes=rows * (vocab_size * 4 + vocab_size // 8),
        flops=0,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=("logits_ptr", "bitmask_ptr", "V", "stride_logits", "stride_bitmask"),
    )


LAUNCHES: tuple[Launch, ...] = (
    _sample_launch("llama-3.1-8b, 32 rows of 128256, float32", 32, 128256, "fp32"),
    _sample_launch("qwen3-8b, 256 rows of 151936, bfloat16", 256, 151936, "bf16"),
    _mask_launch("llama-3.1-8b, 32 rows of 128256, bfloat16", 32, 128256),
)
