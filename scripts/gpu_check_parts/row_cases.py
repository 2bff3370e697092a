"""Operations between products, sampling, and those of calibration."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import quantkit_kernels as kernels
from gpu_check_parts.case import ONE_CODE, Case, Work, random
from quantkit_kernels import (
    reference,
    triton_activation,
    triton_calibration,
    triton_norm,
    triton_quantize,
    triton_rotary,
    triton_sampling,
)

EPS = 1e-5


def cases(*, tiny: bool) -> list[Case]:
    """Shapes of Llama-3.1-8B but for those that name another model."""
    rows, few, width, wide, vocab = (3, 2, 64, 128, 200) if tiny else (2048, 16, 4096, 14336, 128256)
    heads, kv_heads, dim, block = (4, 2, 16, 16) if tiny else (32, 8, 128, 128)
    return [
        Case("rms_norm", f"{few} x {width}", partial(_norm, few, width, False)),
        Case("rms_norm", f"{rows} x {width}, with residual", partial(_norm, rows, width, True)),
        Case("rms_norm", f"heads of qwen3, {rows * heads} x {dim}", partial(_norm, rows * heads, dim, False)),
        Case("rotary_embedding", f"{rows} tokens", partial(_rotary, rows, heads, kv_heads, dim)),
        Case("silu_mul", f"{rows} x {wide}", partial(_gated, "silu_mul", rows, wide)),
        Case("gelu_mul", f"{rows} x {wide}, tanh", partial(_gated, "gelu_mul", rows, wide)),
        Case("quantize_per_token", f"{rows} x {width}", partial(_quantize, "quantize_per_token", rows, width)),
        Case("rms_norm_quantize", f"{rows} x {width}", partial(_quantize, "rms_norm_quantize", rows, width)),
        Case("silu_mul_quantize", f"{rows} x {wide}", partial(_quantize, "silu_mul_quantize", rows, wide)),
        Case("sample_tokens", f"greedy, {few * 2} x {vocab}", partial(_sample, few * 2, vocab, False)),
        Case("sample_tokens", f"top-k and top-p, {few * 2} x {vocab}", partial(_sample, few * 2, vocab, True)),
        Case("apply_token_bitmask", f"{few * 2} x {vocab}", partial(_bitmask, few * 2, vocab)),
        Case("hessian_accumulate", f"{rows} x {width}", partial(_hessian, rows, width)),
        Case("gptq_columns", f"{block} columns of {width}", partial(_gptq, block, width)),
    ]


def _norm(rows: int, columns: int, has_residual: bool, device: torch.device) -> Work:
    x, weight = random(device, rows, columns), random(device, columns, dtype=torch.float32)
    residual = random(device, columns, rows).T.contiguous() if has_residual else None
    return Work(
        run=lambda: kernels.rms_norm(x, weight, EPS, residual=residual),
        reference=lambda: reference.rms_norm(x, weight, EPS, residual=residual),
        launch=triton_norm._launch("", rows, columns, has_residual=has_residual),
    )


def _rotary(tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> Work:
    qkv = random(device, tokens, heads + 2 * kv_heads, dim)
    angles = random(device, tokens, dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    query, key = qkv.split((heads, kv_heads, kv_heads), dim=1)[:2]

    def turned(package: Any) -> tuple[Tensor, ...]:
        pair = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)[:2]
        package.rotary_embedding(*pair, cos, sin)
        return pair

    return Work(
        run=lambda: turned(kernels),
        reference=lambda: turned(reference),
        launch=triton_rotary._launch("", tokens, heads, kv_heads, dim // 2, interleaved=False),
        timed=lambda: kernels.rotary_embedding(query, key, cos, sin),
    )


def _gated(op: str, rows: int, columns: int, device: torch.device) -> Work:
    x = random(device, rows, 2 * columns)
    options = (True,) if op == "gelu_mul" else ()
    return Work(
        run=lambda: getattr(kernels, op)(x, *options),
        reference=lambda: getattr(reference, op)(x, *options),
        launch=triton_activation._launch(op, "", rows, columns, "gelu_tanh" if options else "silu"),
    )


def _quantize(op: str, rows: int, columns: int, device: torch.device) -> Work:
    """What the codes and scales stand for; a code may be the next one where a number lies half-way."""
    x = random(device, rows, 2 * columns if op == "silu_mul_quantize" else columns)
    arguments: tuple[Any, ...] = (x,)
    options: dict[str, Tensor] = {}
    moved = {"quantize_per_token": 3, "rms_norm_quantize": 7, "silu_mul_quantize": 5}[op]
    if op == "rms_norm_quantize":
        arguments = (x, random(device, columns), EPS)
        options = {"residual": random(device, columns, rows).T.contiguous()}

    def meaning(package: Any) -> tuple[Tensor, ...]:
        codes, scale, *rest = getattr(package, op)(*arguments, **options)
        return (codes.float() * scale, *rest)

    kernel = getattr(triton_quantize, f"_{op}_kernel")
    return Work(
        run=lambda: meaning(kernels),
        reference=lambda: meaning(reference),
        launch=triton_quantize._launch(op, "", kernel, rows, columns, moved),
        timed=lambda: getattr(kernels, op)(*arguments, **options),
        tolerance=ONE_CODE,
    )


def _sample(rows: int, vocab: int, is_random: bool, device: torch.device) -> Work:
    logits = random(device, rows, vocab) * 3
    numbers = torch.linspace(0, 0.999, rows, dtype=torch.float64, device=device)
    temperature = torch.full((rows,), 0.8 if is_random else 0.0, device=device)
    top_k = torch.full((rows,), 50 if is_random else 0, dtype=torch.int32, device=device)
    top_p = torch.full((rows,), 0.9 if is_random else 1.0, device=device)
    min_p = torch.full((rows,), 0.01 if is_random else 0.0, device=device)
    arguments = (logits, temperature, top_k, top_p, min_p, numbers)
    return Work(
        run=lambda: kernels.sample_tokens(*arguments),
        reference=lambda: reference.sample_tokens(*arguments),
        launch=triton_sampling._sample_launch("", rows, vocab, "bf16"),
    )


def _bitmask(rows: int, vocab: int, device: torch.device) -> Work:
    logits = random(device, rows, vocab)
    generator = torch.Generator(device).manual_seed(0)
    shape = (rows, -(-vocab // 32))
    mask = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64, device=device).int()

    def masked(package: Any) -> Tensor:
        copy = logits.clone()
        package.apply_token_bitmask(copy, mask)
        return copy.float().exp()  # -inf becomes 0

    return Work(
        run=lambda: masked(kernels),
        reference=lambda: masked(reference),
        launch=triton_sampling._mask_launch("", rows, vocab),
        timed=lambda: kernels.apply_token_bitmask(logits, mask),
        tolerance=0.0,
    )


def _hessian(rows: int, columns: int, device: torch.device) -> Work:
    x = random(device, rows, columns)
    total = torch.zeros(columns, columns, device=device)

    def summed(package: Any) -> Tensor:
        package.hessian_accumulate(x, total.zero_())
        return total.clone()

    return Work(
        run=lambda: summed(kernels),
        reference=lambda: summed(reference),
        launch=triton_calibration._launch_hessian("", rows, columns),
        timed=lambda: kernels.hessian_accumulate(x, total),
        torch_run=lambda: x.T @ x,
        tolerance=1e-4,
    )


def _gptq(size: int, out_features: int, device: torch.device) -> Work:
    """Compared is how good the codes are: one that falls the other way changes all behind it."""
    columns = random(device, size, out_features, dtype=torch.float32)
    scale = random(device, 1, out_features).abs().add_(0.5).div_(4)
    group = torch.zeros(size, dtype=torch.int64, device=device)
    factor = torch.eye(size, device=device) + 0.01 * random(device, size, size, dtype=torch.float32).triu(1)

    def distance(package: Any) -> Tensor:
        codes, _ = package.gptq_columns(columns, scale, group, factor, -8, 7)
        return (codes.float() * scale - columns).square().mean().sqrt()

    return Work(
        run=lambda: distance(kernels),
        reference=lambda: distance(reference),
        launch=triton_calibration._launch_gptq("", size, out_features),
        timed=lambda: kernels.gptq_columns(columns, scale, group, factor, -8, 7),
        tolerance=1e-2,
    )
