"""Compiled CPU body of a decode step: all layers of a decoder in one call; native/decoder.cpp.

One token of one sequence is computed in milliseconds; asked for operation by operation, a third of that is Python.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.cpu_native import FLOATING, PART, TYPES, CacheStructure, cache_structure, is_cache
from quantkit_kernels.cpu_native_linear import NativeWeight, Product
from quantkit_kernels.native_library import native_library
from quantkit_kernels.reference.attention import MAX_HEAD_DIM

BODY = "cpu native, all layers in one call"
NORMS = (
    "attention_norm", "feed_forward_norm", "behind_attention", "behind_feed_forward", "query_norm", "key_norm",
)  # fmt: skip


class _Layer(Structure):
    _fields_ = (
        ("qkv", Product), ("output", Product), ("gate_up", Product), ("down", Product),
        *((name, c_void_p) for name in NORMS),
        ("turns", c_int64), ("window", c_int64), ("key", CacheStructure), ("value", CacheStructure),
    )  # fmt: skip


class _Step(Structure):
    _fields_ = (
        ("tokens", c_int64), ("width", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("head_dim", c_int64),
        ("inner", c_int64), ("eps", c_float), ("scale", c_float), ("softcap", c_float),
        ("type", c_int), ("cache_type", c_int), ("cos", c_void_p), ("sin", c_void_p), ("halves", c_void_p),
        ("slots", c_void_p), ("tables", c_void_p), ("table_stride", c_int64), ("starts", c_void_p),
        ("lengths", c_void_p), ("sequences", c_int64), ("blocks", c_int64), ("block_size", c_int64),
        ("max_length", c_int64), ("parts", c_int64), ("x", c_void_p), ("residual", c_void_p),
        ("normed", c_void_p), ("qkv", c_void_p), ("attended", c_void_p), ("gate_up", c_void_p), ("gated", c_void_p),
        ("partial", c_void_p), ("narrow", c_void_p), ("seconds", c_void_p),
    )  # fmt: skip


@cache
def _decoder_layers() -> Any:
    function = native_library().decoder_layers
    function.argtypes = [POINTER(_Layer), c_int64, POINTER(_Step), c_int]
    function.restype = c_int
    return function


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """What a layer is made of; weights of norms are [K], those over heads [D].

    Attributes:
        qkv: [(H + 2 H_kv) D, K].
        output: [K, H D].
        gate_up: [2 F, K], gate first; the activation is SiLU.
        down: [K, F].
        attention_norm: before attention.
        feed_forward_norm: before the feed-forward layer.
        behind_attention: None for none, as all that follow.
        behind_feed_forward: after the feed-forward layer.
        query_norm: over each query.
        key_norm: over each key.
        turns: which of a step's cosines and sines turn the heads.
        window: places that a query sees, its own included.
    """

    qkv: NativeWeight
    output: NativeWeight
    gate_up: NativeWeight
    down: NativeWeight
    attention_norm: Tensor
    feed_forward_norm: Tensor
    behind_attention: Tensor | None = None
    behind_feed_forward: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    turns: int | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values of all layers, as `paged_attention` takes those of one.

    Attributes:
        caches: for each layer its keys and values, [blocks, block_size, H_kv, D].
        scales: of 8-bit codes, [blocks, block_size, H_kv] float32; empty for none.
    """

    caches: Sequence[tuple[Tensor, Tensor]]
    scales: Sequence[tuple[Tensor, Tensor]] = ()


class NativeDecoder:
    """The layers of a decoder; calling it computes one token of each sequence.

    Args:
        layers: in order.
        num_heads: H.
        num_kv_heads: H_kv; divides H.
        head_dim: D, a multiple of 8.
        eps: of the norms.
        scale: factor of the scores.
        softcap: of the scores; None for none.
        dtype: of keys and values.

    Precision: float32 but for the cache; every number is the one that the operations give one by one.

    Raises:
        ValueError: weights do not fit each other.
    """

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        softcap: float | None,
        dtype: torch.dtype,
    ) -> None:
        self._heads = num_heads, num_kv_heads, head_dim
        self._width, self._inner = layers[0].qkv.in_features, layers[0].down.in_features
        if num_heads % num_kv_heads or head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{num_heads} heads on {num_kv_heads} of {head_dim} numbers are not compiled")
        self._dtype, self._numbers = dtype, (eps, scale, softcap or 0.0)
        self._layers = (_Layer * len(layers))(*(self._structure(layer) for layer in layers))
        self._weights = layers  # the structures point to them
        self._num_turns = max((layer.turns + 1 for layer in layers if layer.turns is not None), default=0)
        self._bound: PagedCache | None = None
        self._seconds = (c_double * 3)()

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Time of all steps so far that products, attention and all else took, in seconds."""
        products, attention, others = self._seconds
        return products, attention, others

    def _structure(self, layer: NativeLayer) -> _Layer:
        heads, kv_heads, head_dim = self._heads
        wanted = {
            "qkv": ((heads + 2 * kv_heads) * head_dim, self._width), "output": (self._width, heads * head_dim),
            "gate_up": (2 * self._inner, self._width), "down": (self._width, self._inner),
        }  # fmt: skip
        for name, shape in wanted.items():
            weight = getattr(layer, name)
            if (weight.out_features, weight.in_features) != shape:
                raise ValueError(f"{name} is {[weight.out_features, weight.in_features]}, allowed is {list(shape)}")
        structure = _Layer(layer.qkv.product, layer.output.product, layer.gate_up.product, layer.down.product)
        for name in NORMS:
            weight = getattr(layer, name)
            size = head_dim if name in ("query_norm", "key_norm") else self._width
            if weight is not None and (weight.dtype, weight.shape) != (torch.float32, (size,)):
                raise ValueError(f"{name} is {weight.dtype} {list(weight.shape)}, allowed is float32 [{size}]")
            setattr(structure, name, None if weight is None else weight.data_ptr())
        structure.turns = -1 if layer.turns is None else layer.turns
        structure.window = layer.window or 0
        return structure

    def _bind(self, cache: PagedCache) -> None:
        """Let the layers know where their keys and values lie."""
        heads = self._heads
        if len(cache.caches) != len(self._layers):
            raise ValueError(f"{len(cache.caches)} caches for {len(self._layers)} layers")
        shape = cache.caches[0][0].shape
        for number, pair in enumerate(cache.caches):
            scales = cache.scales[number] if cache.scales else (None, None)
            for name, numbers, scale in zip(("key", "value"), pair, scales, strict=True):
                is_own = numbers.dtype in (self._dtype, torch.int8) and is_cache(numbers, scale)
                if not is_own or numbers.shape != (*shape[:2], heads[1], heads[2]):
                    raise ValueError(f"the cache of layer {number} is {numbers.dtype} {list(numbers.shape)}, allowed "
                                     f"is {self._dtype} or int8 {[*shape[:2], *heads[1:]]}")  # fmt: skip
                setattr(self._layers[number], name, cache_structure(numbers, scale))
        self._bound = cache

    def __call__(
        self,
        x: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        cache: PagedCache,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        max_context_len: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute a step; keys and values are written into the cache.

        Args:
            x: [T, K] float32 embeddings; overwritten.
            turns: cosines and sines of the tokens' places, [T, rot / 2] float32 each.
            cache: the same object in every step, unless it has moved.
            slot_mapping: [T] int64 slots of the tokens' keys and values.
            block_tables: [T, B] int32, of each sequence.
            cu_seqlens: [T + 1] int32, 0 to T.
            context_lens: [T] int32 tokens of each sequence, this one included.
            max_context_len: the largest of them.

        Returns:
            What the last layer adds, and what it is added to; both [T, K] float32.
        """
        if cache is not self._bound:
            self._bind(cache)
        heads, kv_heads, head_dim = self._heads
        (tokens, width), numbers = x.shape, cache.caches[0][0]
        row_wise = (block_tables, cu_seqlens, context_lens)
        if not (
            x.dtype == torch.float32 and x.is_contiguous() and width == self._width and len(turns) >= self._num_turns
            and all(part.dtype == torch.float32 and part.is_contiguous() and part.shape == pair[0].shape
                    and part.dim() == 2 and len(part) == tokens and 2 * part.shape[1] <= head_dim
                    for pair in turns for part in pair)
            and slot_mapping.dtype == torch.int64 and slot_mapping.shape == (tokens,) and slot_mapping.is_contiguous()
            and all(part.dtype == torch.int32 and part.stride(-1) == 1 for part in row_wise)
            and block_tables.dim() == 2 and len(block_tables) == len(context_lens) == tokens == len(cu_seqlens) - 1
            and 0 <= max_context_len <= block_tables.shape[1] * numbers.shape[1]
        ):  # fmt: skip
            raise ValueError(
                "one of the step's tensors has a shape, a type or a layout that its docstring does not name"
            )
        inner, parts = self._inner, max(1, -(-max_context_len // PART))
        residual = torch.empty_like(x)
        columns = (width, (heads + 2 * kv_heads) * head_dim, heads * head_dim, 2 * inner, inner)
        buffers = [torch.empty(tokens, count) for count in columns]
        partial = torch.empty(tokens, heads, parts, head_dim + 2) if parts > 1 else None
        narrow = torch.empty(tokens, 2 * kv_heads, head_dim, dtype=self._dtype)
        cos, sin = ((c_void_p * len(turns))(*(pair[i].data_ptr() for pair in turns)) for i in (0, 1))
        halves = (c_int64 * len(turns))(*(pair[0].shape[1] for pair in turns))
        step = _Step(
            tokens, width, heads, kv_heads, head_dim, inner, *self._numbers, FLOATING[self._dtype],
            TYPES[numbers.dtype], addressof(cos), addressof(sin), addressof(halves),
            slot_mapping.data_ptr(), block_tables.data_ptr(), block_tables.stride(0), cu_seqlens.data_ptr(),
            context_lens.data_ptr(), tokens, *numbers.shape[:2], max_context_len, parts, x.data_ptr(),
            residual.data_ptr(), *(part.data_ptr() for part in buffers),
            None if partial is None else partial.data_ptr(), narrow.data_ptr(), addressof(self._seconds),
        )  # fmt: skip
        if not _decoder_layers()(self._layers, len(self._layers), byref(step), torch.get_num_threads()):
            raise ValueError(f"slot_mapping must be -1 to {numbers.shape[0] * numbers.shape[1] - 1}, context_lens 0 to "
                             f"{max_context_len}, and block_tables name blocks below {numbers.shape[0]}")  # fmt: skip
        return x, residual
