"""Attention over the paged cache, beside torch's over neighbouring keys."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_check_parts.case import Case, Work, random
from quantkit_kernels import paged_attention, reference, store_kv_cache, triton_paged_attention

BLOCK_SIZE = 16
QUERIES_AT_A_TIME = 256  # of the reference, whose scores lie in memory


@dataclass(frozen=True)
class Shape:
    """``model`` is (heads, heads of keys, head_dim); every sequence has the same lengths."""

    label: str
    model: tuple[int, int, int]
    sequences: int
    query_len: int
    context_len: int
    window: int | None = None
    softcap: float | None = None
    is_int8: bool = False


LLAMA, QWEN, QWEN_SMALL, SMOLLM, GEMMA = (32, 8, 128), (32, 8, 128), (16, 8, 128), (9, 3, 64), (16, 8, 256)
SHAPES = (
    Shape("llama-3.1-8b decode, 32 sequences of 4096", LLAMA, 32, 1, 4096),
    Shape("llama-3.1-8b decode, 32 sequences of 4096, int8", LLAMA, 32, 1, 4096, is_int8=True),
    Shape("llama-3.1-8b decode, 1 sequence of 32768", LLAMA, 1, 1, 32768),
    Shape("llama-3.1-8b decode, 256 sequences of 1024", LLAMA, 256, 1, 1024),
    Shape("qwen3-0.6b decode, 64 sequences of 2048", QWEN_SMALL, 64, 1, 2048),
    Shape("smollm2-135m decode, 32 sequences of 400", SMOLLM, 32, 1, 400),
    Shape("llama-3.1-8b prefill, 4096 tokens", LLAMA, 1, 4096, 4096),
    Shape("llama-3.1-8b prefill, 512 tokens behind 8192, int8", LLAMA, 1, 512, 8704, is_int8=True),
    Shape("smollm2-135m prefill, 2048 tokens", SMOLLM, 1, 2048, 2048),
    Shape("gemma-2-9b decode, 8 sequences of 8192, window 4096", GEMMA, 8, 1, 8192, 4096, 50.0),
    Shape("gemma-2-9b prefill, 4096 tokens, window 1024", GEMMA, 1, 4096, 4096, 1024, 50.0),
)
TINY = (
    Shape("tiny decode", (4, 2, 16), 2, 1, 21),
    Shape("tiny decode, int8", (4, 2, 16), 2, 1, 21, is_int8=True),
    Shape("tiny prefill, window", (4, 2, 16), 1, 5, 21, 8, 50.0),
)


def cases(*, tiny: bool) -> list[Case]:
    """Attention, and what fills its cache."""
    shapes = TINY if tiny else SHAPES
    found = [Case("paged_attention", shape.label, partial(_attention, shape)) for shape in shapes]
    tokens, heads, dim = (3, 2, 16) if tiny else (2048, 8, 128)
    for is_int8 in (False, True):
        label = f"{tokens} tokens of {heads} heads{', int8' if is_int8 else ''}"
        found.append(Case("store_kv_cache", label, partial(_store, label, tokens, heads, dim, is_int8)))
    return found


def _cache(shape: tuple[int, ...], is_int8: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    if not is_int8:
        return random(device, *shape), None
    scale = random(device, *shape[:3], dtype=torch.float32).abs().add_(0.5).div_(100)
    return (random(device, *shape, dtype=torch.float32) * 40).clamp_(-127, 127).to(torch.int8), scale


def _attention(shape: Shape, device: torch.device) -> Work:
    heads, kv_heads, dim = shape.model
    width = -(-shape.context_len // BLOCK_SIZE)
    num_blocks = shape.sequences * width + 1
    key_cache, key_scale = _cache((num_blocks, BLOCK_SIZE, kv_heads, dim), shape.is_int8, device)
    value_cache, value_scale = _cache((num_blocks, BLOCK_SIZE, kv_heads, dim), shape.is_int8, device)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1  # scattered
    tables = order.view(shape.sequences, width).int().to(device)
    query = random(device, shape.sequences * shape.query_len, heads, dim)
    options = {
        "scale": dim**-0.5, "sliding_window": shape.window, "softcap": shape.softcap,
        "key_scale": key_scale, "value_scale": value_scale,
    }  # fmt: skip

    def call(function: Callable[..., Tensor], rows: Tensor, own: Tensor, query_len: int, context_len: int) -> Tensor:
        starts = torch.arange(len(own) + 1, dtype=torch.int32, device=device) * query_len
        lens = torch.full((len(own),), context_len, dtype=torch.int32, device=device)
        return function(
            rows, key_cache, value_cache, own, starts, lens,
            **options, max_query_len=query_len, max_context_len=context_len,
        )  # fmt: skip

    def in_pieces() -> Tensor:
        parts = []
        first = shape.context_len - shape.query_len
        for sequence, rows in enumerate(query.split(shape.query_len)):
            for start in range(0, shape.query_len, QUERIES_AT_A_TIME):
                piece = rows[start : start + QUERIES_AT_A_TIME]
                seen = first + start + len(piece)
                parts.append(call(reference.paged_attention, piece, tables[sequence : sequence + 1], len(piece), seen))
        return torch.cat(parts)

    starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device=device) * shape.query_len
    lens = torch.full((shape.sequences,), shape.context_len, dtype=torch.int32, device=device)
    return Work(
        run=lambda: paged_attention(
            query, key_cache, value_cache, tables, starts, lens,
            **options, max_query_len=shape.query_len, max_context_len=shape.context_len,
        ),
        reference=in_pieces,
        launch=triton_paged_attention._launch(
            "", shape.model, shape.sequences, shape.query_len, shape.context_len,
            window=shape.window, softcap=shape.softcap, cache="i8" if shape.is_int8 else "bf16",
        ),
        torch_run=_sdpa(shape, query, device),
    )  # fmt: skip


def _sdpa(shape: Shape, query: Tensor, device: torch.device) -> Callable[[], object] | None:
    """Torch's attention over keys in bfloat16 that lie side by side; None where it has no such mask."""
    is_plain = shape.window is None and shape.softcap is None
    if not is_plain or shape.query_len not in (1, shape.context_len):
        return None
    _, kv_heads, dim = shape.model
    keys, values = (random(device, shape.sequences, kv_heads, shape.context_len, dim) for _ in range(2))
    rows = query.view(shape.sequences, shape.query_len, -1, dim).transpose(1, 2)
    return partial(F.scaled_dot_product_attention, rows, keys, values, is_causal=shape.query_len > 1, enable_gqa=True)


def _store(label: str, tokens: int, heads: int, dim: int, is_int8: bool, device: torch.device) -> Work:
    from quantkit_kernels import triton_store_kv_cache

    blocks = -(-tokens // BLOCK_SIZE) + 1
    key, value = random(device, tokens, heads, dim), random(device, tokens, heads, dim + 8)[..., :dim]
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[:tokens].to(device)

    def stored(function: Callable[..., None]) -> Callable[[], tuple[Tensor, ...]]:
        kind = torch.int8 if is_int8 else key.dtype
        caches = [torch.zeros(blocks, BLOCK_SIZE, heads, dim, dtype=kind, device=device) for _ in range(2)]
        scales = [torch.zeros(blocks, BLOCK_SIZE, heads, device=device) for _ in range(2)] if is_int8 else []

        def store() -> tuple[Tensor, ...]:
            function(key, value, *caches, slots, *scales)
            return (*caches, *scales)

        return store

    launch = triton_store_kv_cache._launch(label, tokens, heads, dim, is_int8=is_int8)
    return Work(stored(store_kv_cache), stored(reference.store_kv_cache), launch, tolerance=0.0)
