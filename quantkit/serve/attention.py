"""Our attention inside transformers' models: it writes keys and values into the paged cache and attends over it.

transformers looks attention up by name and hands it whatever the model's own layer would have used. So each option of
a layer is either honoured here or refused; `quantkit.serve.models.probe` calls every layer once at load, so that a
refusal comes before the first request.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quantkit.errors import EngineError
from quantkit.serve.attention_metadata import AttentionMetadata, Span, is_visible
from quantkit.serve.kv_cache import KVCache, KVShape
from quantkit.serve.paged_step import PagedStep
from quantkit_kernels import paged_attention as attend_blocks

ATTENTION_NAME = "quantkit_paged"
# What models pass along and attention needs not look at: places are in the rotated keys, outputs are not collected.
IRRELEVANT = frozenset({"position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions"})


class Probe:
    """Collects what the layers of a model hand to attention, and checks that it can be honoured.

    Attributes:
        shapes: layer number -> shape of its keys and values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.shapes: dict[int, KVShape] = {}

    def record(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> None:
        """Note one layer.

        Raises:
            EngineError: its type, its mask or its number is not what the engine works with.
        """
        layer = layer_index(module)
        if key.dtype != self._dtype or value.dtype != self._dtype:
            raise refusal(module, f"keys in {key.dtype} and values in {value.dtype} in a {self._dtype} model")
        if layer in self.shapes:
            raise refusal(module, "attention is called twice")
        rows = getattr(mask, "probed_rows", None)
        if mask is None or rows is None:
            raise refusal(module, "the model makes its own attention mask")
        if window is not None and window >= mask.shape[-1]:
            raise refusal(module, f"sliding_window={window} is in no configuration that the engine knows")
        wanted = is_visible(rows.unsqueeze(1), torch.arange(mask.shape[-1]), window)
        if not torch.equal(mask.expand(1, 1, *wanted.shape)[0, 0], wanted):
            kind = "causal" if window is None else f"causal with sliding_window={window}"
            raise refusal(module, f"the attention mask is not {kind}")
        self.shapes[layer] = KVShape(key.shape[1], key.shape[3], value.shape[3])


PROBE: ContextVar[Probe | None] = ContextVar("quantkit_attention_probe", default=None)


def layer_index(module: nn.Module) -> int:
    """The number of the layer that an attention module belongs to."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise refusal(module, "the layer has no number")
    return layer


def refusal(module: nn.Module, what: str) -> EngineError:
    """The error for a layer that needs something which the engine does not do."""
    kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return EngineError(f"the engine cannot run {kind}, layer {getattr(module, 'layer_idx', '?')}: {what}")


def paged_mask(
    q_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Transformers' mask for our attention: none, because each span knows its own.

    While a model is probed it is the model's mask on a few chosen rows instead, around the edges of every window that
    the mask or the configuration names, for `Probe.record` to check.
    """
    if PROBE.get() is None:
        return None
    configured = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    edges = [edge for edge in (q_length, local_size, *configured) if isinstance(edge, int)]
    places = {max(0, row) for edge in edges for row in (0, edge - 1, edge, edge + 1, 2 * edge + 1)}
    rows = torch.tensor(sorted(places))
    columns = torch.arange(int(rows.max()) + 1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        mask = mask_function(zero, zero, rows.view(1, 1, -1, 1), columns.view(1, 1, 1, -1))
    except (IndexError, RuntimeError, TypeError):
        return None  # a mask of the model's own making, which record refuses
    mask = mask.expand(1, 1, len(rows), len(columns)).clone()
    mask.probed_rows = rows  # type: ignore[attr-defined]
    return mask


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    paged: AttentionMetadata | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of all tokens of a step.

    Args:
        module: the layer's attention module.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H_kv divides H.
        value: [1, H_kv, T, D_v].
        attention_mask: what `paged_mask` made.
        scaling: factor of the scores; None is 1 / sqrt(D).
        dropout: must be 0.
        sliding_window: places that a query sees, its own included; None is all before it.
        softcap: scores become softcap * tanh(scores / softcap).
        is_causal: must not be False.
        paged: the step; comes through the model from the runner.
        options: anything else that a layer asks for is refused, unless it does not concern attention.

    Returns:
        [1, T, H, D_v], and None for the weights.

    Raises:
        EngineError: something cannot be honoured.
    """
    if paged is None:
        raise refusal(module, "the model does not pass the step on to attention")
    if dropout or is_causal is False:
        raise refusal(module, f"dropout={dropout}" if dropout else "attention is not causal")
    for name in options.keys() - IRRELEVANT:
        if options[name] is not None and options[name] is not False:
            raise refusal(module, f"attention needs {name}, which is not supported")
    probe = PROBE.get()
    if probe is not None:
        probe.record(module, key, value, attention_mask, sliding_window)
    elif attention_mask is not None:
        raise refusal(module, "the model makes its own attention mask")
    layer = Layer(layer_index(module), sliding_window, scaling, softcap)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(query, key, value, layer, paged).unsqueeze(0), None


class Layer(NamedTuple):
    """What a layer asks of attention: see `paged_attention`."""

    number: int
    window: int | None
    scaling: float | None
    softcap: float | None


def attend(query: Tensor, key: Tensor, value: Tensor, layer: Layer, metadata: AttentionMetadata | PagedStep) -> Tensor:
    """Attention of all tokens of a step in one layer; their keys and values are written into the cache.

    Args:
        query: [T, H, D], in the dtype of the masks of ``metadata``.
        key: [T, H_kv, D] in the dtype of the cache; H_kv divides H.
        value: [T, H_kv, D_v], likewise.
        layer: its number, and what it asks for.
        metadata: the step.

    Returns:
        [T, H, D_v] in the dtype of the query.
    """
    if isinstance(metadata, PagedStep):
        return metadata.attend(query, key, value, layer)
    if metadata.cache is not None:
        metadata.cache.store_unpadded(layer.number, key, value, metadata.slot_mapping)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    outputs = [_attend(query, key, value, span, metadata.cache, layer) for span in metadata.spans]
    return outputs[0][0] if len(outputs) == 1 else torch.cat(outputs, dim=1)[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, span: Span, cache: KVCache | None, layer: Layer) -> Tensor:
    """[1, span's tokens, H, D_v]."""
    if span.stop - span.start != query.shape[2]:
        query = query[:, :, span.start : span.stop]
    if span.is_whole:
        key, value = (tensor[:, :, span.start : span.stop].to(query.dtype) for tensor in (key, value))
        is_plain = layer.softcap is None and (layer.window is None or layer.window >= span.num_queries)
        return _attend_chunk(query, key, value, None if is_plain else span.whole_mask(layer.window), layer)
    assert cache is not None, "without a cache every request is whole"
    if span.num_queries == 1 and cache.reads_blocks:
        return _attend_blocks(query, span, cache, layer)
    where = span.key_range(layer.window)
    # A decode reads its keys once: it is done in their type. A chunk reads them often: they are brought to its own.
    dtype = cache.dtype if span.num_queries == 1 else query.dtype
    if where.block_ids is None:
        keys, values = cache.view(layer.number, where.first_slot, where.num_keys)
    else:
        keys, values = cache.gather(layer.number, where.block_ids, where.num_seqs, dtype)
    keys, values = keys.to(dtype), values.to(dtype)
    if span.num_queries == 1:
        return _attend_decodes(query.to(dtype), keys, values, where.mask, layer).to(query.dtype)
    return _attend_chunk(query, keys, values, where.mask, layer)


def _attend_blocks(query: Tensor, span: Span, cache: KVCache, layer: Layer) -> Tensor:
    """[1, n, H, D_v] for n requests with one query each, [1, H, n, D], by a kernel that reads their blocks."""
    key_scale, value_scale = cache.scales[layer.number] if cache.scales else (None, None)
    own = span.sequences
    output = attend_blocks(
        query[0].transpose(0, 1), *cache.caches[layer.number], own.block_tables, own.cu_seqlens, own.context_lens,
        scale=query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling,
        sliding_window=layer.window, softcap=layer.softcap, key_scale=key_scale, value_scale=value_scale,
        max_query_len=1, max_context_len=own.max_context_len,
    )  # fmt: skip
    return output.unsqueeze(0)


def _attend_decodes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: Layer) -> Tensor:
    """[1, n, H, D_v] for n requests with one query each: [1, H, n, D], [n, H_kv, k, D], [n, H_kv, k, D_v].

    The query heads that share keys are folded into a list of queries, so that keys are not repeated.
    """
    num_seqs, num_kv_heads = key.shape[:2]
    num_heads = query.shape[1]
    folded = query.transpose(1, 2).reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, -1)
    if layer.softcap is None:
        output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=layer.scaling)
    else:
        output = _softcapped(folded, key, value, mask, layer)
    return output.reshape(1, num_seqs, num_heads, -1)


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: Layer) -> Tensor:
    """[1, q, H, D_v] for one request: [1, H, q, D], [1, H_kv, k, D], [1, H_kv, k, D_v]; no mask is causal, q = k."""
    groups = query.shape[1] // key.shape[1]
    if layer.softcap is None:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=layer.scaling, enable_gqa=groups > 1
        )
    else:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        output = _softcapped(query, key, value, mask, layer)
    return output.transpose(1, 2)


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: Layer) -> Tensor:
    """Attention written out, in float32, for scores that are softened before the softmax."""
    assert layer.softcap is not None, "called for layers with a softcap"
    scaling = query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    scores = layer.softcap * torch.tanh(query.float() @ key.float().transpose(-1, -2) * (scaling / layer.softcap))
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def register_attention() -> None:
    """Make our attention known to transformers as ``quantkit_paged``."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, paged_mask)
