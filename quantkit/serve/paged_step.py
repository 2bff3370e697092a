"""Attention of a step on a device: keys and values go into the paged cache, and are read there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.serve.kv_cache import KVCache
from quantkit.serve.step_inputs import SequenceGroup, StepInputs
from quantkit_kernels import paged_attention

if TYPE_CHECKING:
    from quantkit.serve.attention import Layer


class PagedStep:
    """What attention needs to know about a step on a device.

    Decoding requests and chunks are two calls: a kernel that reads a few queries over many keys is laid out otherwise
    than one that reads many.

    Args:
        inputs: of the step.
        cache: keys and values of all requests, on the same device.
        has_one_layer: the layers take turns in a cache that has room for one, for a step that leaves nothing behind.
    """

    def __init__(self, inputs: StepInputs, cache: KVCache, *, has_one_layer: bool = False) -> None:
        self._inputs = inputs
        self._cache = cache
        self._has_one_layer = has_one_layer

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: "Layer") -> Tensor:
        """[T, H, D_v]; see `quantkit.serve.attention.attend`."""
        number = 0 if self._has_one_layer else layer.number
        self._cache.store(number, key, value, self._inputs.slot_mapping)
        outputs, start = [], 0
        for group in self._inputs.groups:
            outputs.append(self._attend(query[start : start + group.num_tokens], number, layer, group))
            start += group.num_tokens
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, query: Tensor, number: int, layer: "Layer", group: SequenceGroup) -> Tensor:
        key_cache, value_cache = self._cache.caches[number]
        key_scale, value_scale = self._cache.scales[number] if self._cache.scales else (None, None)
        return paged_attention(
            query,
            key_cache,
            value_cache,
            group.block_tables,
            group.cu_seqlens,
            group.context_lens,
            scale=query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling,
            sliding_window=layer.window,
            softcap=layer.softcap,
            key_scale=key_scale,
            value_scale=value_scale,
            max_query_len=group.max_query_len,
            max_context_len=group.max_context_len,
        )
