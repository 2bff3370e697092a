"""Triton body of rotary_embedding: one program per token and a few heads of queries or keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of
from quantkit_kernels.reference import check_rotary_embedding

TILE = 2048  # numbers that a program turns
NUM_WARPS = 4


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    heads_ptr, rows, is_head, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Turn the pairs of some heads: ``rows`` [BLOCK_H, 1] are where they begin, cos and sin [1, BLOCK_HALF]."""
    if INTERLEAVED:
        place = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = is_head & (place < 2 * HALF)
        pairs = tl.load(heads_ptr + rows + place, mask=mask, other=0.0)
        first, second = tl.split(pairs.to(tl.float32).reshape(rows.shape[0], BLOCK_HALF, 2))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(heads_ptr + rows + place, turned.reshape(pairs.shape).to(pairs.dtype), mask=mask)
    else:
        place = tl.arange(0, BLOCK_HALF)[None, :]
        mask = is_head & (place < HALF)
        first = tl.load(heads_ptr + rows + place, mask=mask, other=0.0)
        second = tl.load(heads_ptr + rows + HALF + place, mask=mask, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        tl.store(heads_ptr + rows + place, (a * cos - b * sin).to(first.dtype), mask=mask)
        tl.store(heads_ptr + rows + HALF + place, (b * cos + a * sin).to(first.dtype), mask=mask)


@triton.jit
def _rotary_embedding_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    num_kv_heads,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_cos,
    stride_sin,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + token * stride_cos + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_sin + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    q_programs = tl.cdiv(num_heads, BLOCK_H)
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    if tl.program_id(1) < q_programs:
        head += tl.program_id(1) * BLOCK_H
        rows = token * stride_q_token + head * stride_q_head
        _turn(q_ptr, rows, head < num_heads, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        head += (tl.program_id(1) - q_programs) * BLOCK_H
        rows = token * stride_k_token + head * stride_k_head
        _turn(k_ptr, rows, head < num_kv_heads, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)


def tile_of(num_heads: int, half: int) -> tuple[int, int]:
    """(heads, pairs of a head) that a program handles; powers of two."""
    block_half = triton.next_power_of_2(half)
    return min(triton.next_power_of_2(num_heads), max(1, TILE // (2 * block_half))), block_half


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Launch the Triton kernel; arguments and effect as `quantkit_kernels.reference.rotary_embedding`.

    Precision: float32, rounded once. Needs: unit stride along D; any other strides.

    Raises:
        ValueError: shapes, types, strides or devices that do not fit.
    """
    check_rotary_embedding(q, k, cos, sin)
    num_tokens, num_heads = q.shape[:2]
    num_kv_heads, half = k.shape[1], cos.shape[1]
    block_h, block_half = tile_of(max(num_heads, num_kv_heads, 1), half)
    programs = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    if num_tokens == 0 or programs == 0:
        return
    with torch.cuda.device(q.device) if q.is_cuda else torch.device("cpu"):
        _rotary_embedding_kernel[(num_tokens, programs)](
            q,
            k,
            cos,
            sin,
            num_heads,
            num_kv_heads,
            *q.stride()[:2],
            *k.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            HALF=half,
            BLOCK_H=block_h,
            BLOCK_HALF=block_half,
            INTERLEAVED=interleaved,
            num_warps=NUM_WARPS,
        )


def _launch(label: str, tokens: int, heads: int, kv_heads: int, half: int, *, interleaved: bool) -> Launch:
    block_h, block_half = tile_of(heads, half)
    constexprs: dict[str, object] = {
        "HALF": half, "BLOCK_H": block_h, "BLOCK_HALF": block_half, "INTERLEAVED": interleaved
    }  # fmt: skip
    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    signature = signature_of(_rotary_embedding_kernel, types, constexprs)
    turned = tokens * (heads + kv_heads) * 2 * half
    return Launch(
        op="rotary_embedding",
        label=label,
        kernel=_rotary_embedding_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=4 * turned + 8 * tokens * half,
        flops=3 * turned,
        flop_dtype="fp32",
        needs=("128-bit loads",),
        divisible_by_16=tuple(n for n in signature if n.startswith("stride") or signature[n].startswith("*")),
    )


LAUNCHES: tuple[Launch, ...] = (
    _launch("llama-3.1-8b, 2048 tokens", 2048, 32, 8, 64, interleaved=False),
    _launch("smollm2-135m, 32 tokens", 32, 9, 3, 32, interleaved=False),
    _launch("32 heads of 128, pairs side by side, 2048 tokens", 2048, 32, 8, 64, interleaved=True),
)
