"""The layers of a decoder as one compiled call, for steps in which every request computes one token on a CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.serve.attention_metadata import AttentionMetadata
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.models.decoder_config import DecoderConfig
from quantkit.serve.models.feed_forward import FeedForward
from quantkit.serve.models.projection import Projection
from quantkit.serve.paged_step import PagedStep
from quantkit_kernels.cpu_native_decoder import BODY, NativeDecoder, NativeLayer, PagedCache
from quantkit_kernels.cpu_native_linear import NativeWeight
from quantkit_kernels.dispatch import activation_dtype
from quantkit_kernels.native_library import native_blocker
from quantkit_kernels.reference.attention import MAX_HEAD_DIM, is_head_dim

if TYPE_CHECKING:
    from quantkit.serve.models.decoder import DecoderLayer


OPERATION = "decoder_layers"


class NotCompiledError(Exception):
    """Why the layers are not one compiled call."""

    def __str__(self) -> str:
        return f"{OPERATION}: one operation at a time ({self.args[0]})"


class CompiledLayers:
    """All layers of a decoder in one call, where they and a step allow it.

    Args:
        layers: in order.
        config: of the decoder.
        dtype: of keys and values.
        device: of the model.

    Raises:
        NotCompiledError: a part of them has no compiled body.
    """

    def __init__(
        self, layers: Sequence["DecoderLayer"], config: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        _check(config, dtype, device)
        self._names = sorted({name for name in config.rope if name is not None})
        numbers = {name: number for number, name in enumerate(self._names)}
        self._decoder = NativeDecoder(
            [_layer(layer, numbers) for layer in layers],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            scale=config.scaling,
            softcap=config.attention_softcap,
            dtype=dtype,
        )
        self._cache: KVCache | None = None
        self._paged: PagedCache | None = None

    def __str__(self) -> str:
        return f"{OPERATION}: {BODY} (in steps of one token of each request)"

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Time of all steps so far that products, attention and all else took, in seconds."""
        return self._decoder.seconds

    def takes(self, metadata: AttentionMetadata | PagedStep) -> bool:
        """Whether a step is one token of each request, with a cache whose blocks are read where they lie."""
        return (
            isinstance(metadata, AttentionMetadata)
            and metadata.cache is not None
            and metadata.cache.reads_blocks
            and len(metadata.spans) == 1
            and metadata.spans[0].num_queries == 1
        )

    def __call__(
        self, x: Tensor, turns: Mapping[str, tuple[Tensor, Tensor]], metadata: AttentionMetadata | PagedStep
    ) -> tuple[Tensor, Tensor]:
        """What the last layer adds, and what it is added to, both [T, K]; x is overwritten."""
        assert isinstance(metadata, AttentionMetadata), "takes said so"
        assert metadata.cache is not None, "takes said so"
        if metadata.cache is not self._cache:
            self._cache, self._paged = metadata.cache, PagedCache(metadata.cache.caches, metadata.cache.scales)
        assert self._paged is not None, "set with the cache"
        own = metadata.spans[0].sequences
        return self._decoder(
            x, [turns[name] for name in self._names], self._paged, metadata.slot_mapping,
            own.block_tables, own.cu_seqlens, own.context_lens, own.max_context_len,
        )  # fmt: skip


def _check(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        raise NotCompiledError(f"the model is on {device}")
    if (blocker := native_blocker()) is not None:
        raise NotCompiledError(blocker)
    if activation_dtype(device, dtype) != torch.float32:
        raise NotCompiledError(f"activations are {activation_dtype(device, dtype)}, compiled for float32")
    if config.activation != "silu":
        raise NotCompiledError(f"the gate is {config.activation}, compiled for silu")
    if not is_head_dim(config.head_dim):
        raise NotCompiledError(f"heads of {config.head_dim} numbers, compiled for multiples of 8 up to {MAX_HEAD_DIM}")


def _layer(layer: "DecoderLayer", turns: dict[str, int]) -> NativeLayer:
    attention, feed_forward = layer.attention, layer.feed_forward
    if not isinstance(feed_forward, FeedForward):
        raise NotCompiledError("it has experts")
    query_norm, key_norm = attention.head_norms or (None, None)
    return NativeLayer(
        _native(attention.qkv),
        _native(attention.output),
        _native(feed_forward.gate_up),
        _native(feed_forward.down),
        layer.attention_norm,
        layer.feed_forward_norm,
        layer.behind_attention,
        layer.behind_feed_forward,
        query_norm,
        key_norm,
        None if attention.rope is None else turns[attention.rope],
        attention.layer.window,
    )


def _native(projection: Projection) -> NativeWeight:
    """The one compiled product of a projection."""
    if len(projection.products) == 1 and isinstance(projection.products[0], NativeWeight):
        return projection.products[0]
    products = sorted({f"{operation} by {body}" for operation, body, _ in projection.bodies})
    raise NotCompiledError(f"it multiplies with {', '.join(products)}")
