"""The second half of a split paged_attention: the parts of each query put together by their log-sum-exp."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.launches import Launch, signature_of

NUM_WARPS = 2


@triton.jit
def _merge_splits_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    lse_ptr,
    out_ptr,
    NUM_SPLITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + split, mask=split < NUM_SPLITS, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    # Parts behind the sequence's end are not read; one that is NaN is.
    used = tl.max(tl.where(lse != float("-inf"), split + 1, 0), axis=0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for index in range(0, used):
        part = tl.load(lse_ptr + row * NUM_SPLITS + index)
        weight = tl.exp2(part - largest)
        mask = d < tl.where(part != float("-inf"), D, 0)  # nothing was written for a part without keys
        acc += weight * tl.load(parts_ptr + (row * NUM_SPLITS + index) * D + d, mask=mask, other=0.0)
        total += weight
    out = acc / tl.where(used > 0, total, 1.0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def merge_splits(parts: Tensor, lse: Tensor, out: Tensor) -> None:
    """Write the weighted mean of the parts of each row: weights 2**lse, in the order of the parts, in float32.

    Args:
        parts: [T, H, splits, D] float32, contiguous; a part whose lse is -inf is not read.
        lse: [T, H, splits] float32, contiguous; base 2.
        out: [T, H, D], contiguous; zeros where all lse are -inf.
    """
    num_splits, head_dim = parts.shape[2:]
    with torch.cuda.device(out.device) if out.is_cuda else torch.device("cpu"):
        _merge_splits_kernel[(out.shape[0] * out.shape[1],)](
            parts,
            lse,
            out,
            NUM_SPLITS=num_splits,
            D=head_dim,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=NUM_WARPS,
        )


def _launch(label: str, rows: int, num_splits: int, head_dim: int) -> Launch:
    constexprs: dict[str, object] = {
        "NUM_SPLITS": num_splits,
        "D": head_dim,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    types = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    return Launch(
        op="merge_splits",
        label=label,
        kernel=_merge_splits_kernel,
        signature=signature_of(_merge_splits_kernel, types, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=3,
        bytes=rows * (num_splits * (head_dim + 1) * 4 + head_dim * 2),
        flops=2 * rows * num_splits * head_dim,
        flop_dtype="fp32",
        divisible_by_16=tuple(types),
    )


LAUNCHES: tuple[Launch, ...] = (_launch("llama-3.1-8b decode, 32 sequences of 4096", 32 * 32, 8, 128),)
