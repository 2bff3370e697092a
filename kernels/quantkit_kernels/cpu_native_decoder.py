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

from quantkit_kernels.cpu_native import FLOATING, PART, TYPES, CacheStructure, cache_structure
from quantkit_kernels.cpu_native_linear import NativeWeight, Product
from quantkit_kernels.native_arguments import check_dense, check_readable, pointer
from quantkit_kernels.native_library import native_library
from quantkit_kernels.reference.arguments import check_argument
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
        caches: for each layer its keys and values, [blocks, block_size, H_kv, D], all of one type.
        scales: of 8-bit codes, [blocks, block_size, H_kv] float32; empty for none.
    """

    caches: Sequence[tuple[Tensor, Tensor]]
    scales: Sequence[tuple[Tensor, Tensor]] = ()


class NativeDecoder:
    """The layers of a decoder; calling it computes one token of each sequence.

    Args:
        layers: in order, one or more.
        num_heads: H.
        num_kv_heads: H_kv; divides H.
        head_dim: D, a multiple of 8.
        eps: of the norms.
        scale: factor of the scores.
        softcap: of the scores; None for none.
        dtype: of keys and values.

    Precision: float32 but for the cache; every number is the one that the operations give one by one.

    Raises:
        ValueError: weights do not fit each other, or are not float32, contiguous and on the CPU where they are norms'.
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
        if not layers:
            raise ValueError("0 layers, allowed is 1 or more")
        self._heads = num_heads, num_kv_heads, head_dim
        self._width, self._inner = layers[0].qkv.in_features, layers[0].down.in_features
        if num_heads % num_kv_heads or head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"{num_heads} heads on {num_kv_heads} of {head_dim} numbers are not compiled")
        self._dtype, self._numbers = dtype, (eps, scale, softcap or 0.0)
        self._layers = (_Layer * len(layers))(*(self._structure(layer) for layer in layers))
        self._weights = tuple(layers)  # the structures point to them
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
            if weight is not None:
                check_dense(name, weight, torch.float32, (size,))
            setattr(structure, name, pointer(weight))
        structure.turns = -1 if layer.turns is None else layer.turns
        structure.window = layer.window or 0
        return structure

    def _bind(self, cache: PagedCache) -> None:
        """Let the layers know where their keys and values lie; a cache that does not fit changes nothing."""
        count = len(self._layers)
        if len(cache.caches) != count or len(cache.scales) not in (0, count):
            raise ValueError(f"{len(cache.caches)} caches and {len(cache.scales)} pairs of scales for {count} layers")
        scales: Sequence[tuple[Tensor | None, Tensor | None]] = cache.scales or [(None, None)] * count
        places = [
            [(f"{name} cache of layer {number}", numbers, scale)
             for name, numbers, scale in zip(("key", "value"), pair, own, strict=True)]
            for number, (pair, own) in enumerate(zip(cache.caches, scales, strict=True))
        ]  # fmt: skip
        first = cache.caches[0][0]
        dtypes = (first.dtype,) if first.dtype in (self._dtype, torch.int8) else (self._dtype, torch.int8)
        for layer in places:
            for name, numbers, scale in layer:
                check_argument(name, numbers, dtypes, (*first.shape[:2], *self._heads[1:]))
                check_readable(**{name: numbers})
                if (scale is None) == (numbers.dtype == torch.int8):
                    raise ValueError(f"{name} is {numbers.dtype} {'without' if scale is None else 'with'} scales, "
                                     "allowed are scales for torch.int8 only")  # fmt: skip
                if scale is not None:
                    check_dense(f"scale of the {name}", scale, torch.float32, numbers.shape[:3])
        for structure, (key, value) in zip(self._layers, places, strict=True):
            structure.key, structure.value = cache_structure(*key[1:]), cache_structure(*value[1:])
        self._bound = cache

    def _check_step(
        self,
        x: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        cache: PagedCache,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        max_context_len: int,
    ) -> None:
        """Raise ValueError, with the allowed values, unless the arguments of a call fit."""
        check_dense("x", x, torch.float32, ("T", self._width))
        tokens = len(x)
        if len(turns) < self._num_turns:
            raise ValueError(f"{len(turns)} turns, allowed is {self._num_turns} or more: layers name so many")
        for number, (cos, sin) in enumerate(turns):
            check_dense(f"cosines of turn {number}", cos, torch.float32, (tokens, "rot / 2"))
            check_dense(f"sines of turn {number}", sin, torch.float32, (tokens, cos.shape[1]))
            if 2 * cos.shape[1] > self._heads[2]:
                raise ValueError(f"turn {number} has {cos.shape[1]} columns, allowed is up to {self._heads[2] // 2}")
        check_dense("slot_mapping", slot_mapping, torch.int64, (tokens,))
        check_dense("cu_seqlens", cu_seqlens, torch.int32, (tokens + 1,))
        check_dense("context_lens", context_lens, torch.int32, (tokens,))
        check_argument("block_tables", block_tables, (torch.int32,), (tokens, "B"))
        check_readable(block_tables=block_tables)
        room = block_tables.shape[1] * cache.caches[0][0].shape[1]
        if not 0 <= max_context_len <= room:
            raise ValueError(f"max_context_len={max_context_len}, allowed is 0 to {room}, the room of block_tables")

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

        Raises:
            ValueError: a type, shape, stride, device or number that does not fit. Slots, lengths and blocks are read
                on the way: keys and values of the first layer may have been written by then.
        """
        if cache is not self._bound:
            self._bind(cache)
        self._check_step(
            x, turns, cache, slot_mapping, block_tables, cu_seqlens, context_lens, max_context_len
        )  # fmt: skip
        heads, kv_heads, head_dim = self._heads
        (tokens, width), numbers = x.shape, cache.caches[0][0]
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
            pointer(partial), narrow.data_ptr(), addressof(self._seconds),
        )  # fmt: skip
        if not _decoder_layers()(self._layers, len(self._layers), byref(step), torch.get_num_threads()):
            raise ValueError(f"slot_mapping must be -1 to {numbers.shape[0] * numbers.shape[1] - 1}, context_lens 0 to "
                             f"{max_context_len}, and block_tables name blocks below {numbers.shape[0]}")  # fmt: skip
        return x, residual
