"""Products with packed weights, beside torch's with the same weight in bfloat16."""

from functools import partial

import torch
import torch.nn.functional as F

from gpu_check_parts.case import Case, Work, random
from quantkit_kernels import (
    prepack_w4a16,
    prepack_w8a8,
    prepack_w8a16,
    reference,
    triton_w4a16,
    triton_w8a8,
    triton_w8a16,
)
from quantkit_kernels.tiling import generation

# [N, K] and groups
LAYERS = {
    "llama-3.1-8b o_proj": (4096, 4096),
    "llama-3.1-8b gate_up_proj": (28672, 4096),
    "llama-3.1-8b down_proj": (4096, 14336),
    "qwen3-8b gate_up_proj": (24576, 4096),
    "qwen3-0.6b down_proj": (1024, 3072),
    "smollm2-135m gate_up_proj": (3072, 576),
}
ROWS = (1, 16, 64, 256, 2048)
FEW_ROWS = (1, 32)  # of the smaller models
BIG = "llama"


def cases(*, tiny: bool) -> list[Case]:
    """The decoding shapes of every layer first, then more rows."""
    found = []
    for rows in (1, 3) if tiny else sorted({*ROWS, *FEW_ROWS}):
        for label, (n, k) in {"tiny": (32, 128)}.items() if tiny else LAYERS.items():
            if tiny or rows in (ROWS if label.startswith(BIG) else FEW_ROWS):
                found += _of_layer(f"{label}, M={rows}", rows, n, k, has_more=rows in (3, 16))
    return found


def _of_layer(label: str, m: int, n: int, k: int, *, has_more: bool) -> list[Case]:
    group = next(size for size in (128, 64, 32) if k % size == 0)
    found = [
        Case("w4a16_gemm", f"{label}, group {group}", partial(_w4a16, m, n, k, group, False)),
        Case("w8a16_gemm", f"{label}, channel", partial(_w8a16, m, n, k)),
        Case("w8a8_gemm", label, partial(_w8a8, m, n, k)),
    ]
    if has_more:
        found.append(Case("w4a16_gemm", f"{label}, asymmetric, group 32", partial(_w4a16, m, n, k, 32, True)))
    return found


def _codes(n: int, k: int, bits: int, device: torch.device) -> torch.Tensor:
    top = 2 ** (bits - 1)
    generator = torch.Generator(device).manual_seed(n + k)
    return torch.randint(-top, top, (n, k), generator=generator, dtype=torch.int8, device=device)


def _w4a16(m: int, n: int, k: int, group: int, has_zero: bool, device: torch.device) -> Work:
    words = reference.pack_int4(_codes(n, k, 4, device))
    scale = random(device, n, k // group).abs().add_(0.5).mul_(k**-0.5)
    zero = _codes(n, k // group, 4, device) if has_zero else None
    x, dense = random(device, m, k), random(device, n, k)
    weight, _ = prepack_w4a16(words, scale, group, x.dtype, zero)
    return Work(
        run=lambda: weight(x),
        reference=lambda: reference.w4a16_gemm(x, words, scale, group, zero),
        launch=triton_w4a16._launch("", m, n, k, group, has_zero=has_zero),
        torch_run=lambda: F.linear(x, dense),
    )


def _w8a16(m: int, n: int, k: int, device: torch.device) -> Work:
    codes, scale = _codes(n, k, 8, device), random(device, n, 1).abs().add_(0.5).mul_(k**-0.5)
    x, dense = random(device, m, k), random(device, n, k)
    weight, _ = prepack_w8a16(codes, scale, -1, x.dtype)
    return Work(
        run=lambda: weight(x),
        reference=lambda: reference.w8a16_gemm(x, codes, scale, -1),
        launch=triton_w8a16._launch("", m, n, k, -1),
        torch_run=lambda: F.linear(x, dense),
    )


def _w8a8(m: int, n: int, k: int, device: torch.device) -> Work:
    codes, scale = _codes(n, k, 8, device), random(device, n, 1).abs().add_(0.5).mul_(k**-0.5)
    x, dense = random(device, m, k), random(device, n, k)
    weight, _ = prepack_w8a8(codes, scale, x.dtype)
    return Work(
        run=lambda: weight(x),
        reference=lambda: reference.w8a8_gemm(x, codes, scale),
        launch=triton_w8a8._launch("", m, n, k, (generation(device),)),
        torch_run=lambda: F.linear(x, dense),
    )
