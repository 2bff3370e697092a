"""Our attention inside transformers' models: it writes keys and values into the paged cache and attends over it.

transformers looks attention up by name and hands it whatever the model's own layer would have used. So each option of
a layer is either honoured here or refused; `quantkit.serve.models.probe` calls every layer once at load, so that a
refusal comes before the first request.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quantkit.errors import EngineError
from quantkit.serve.attention_metadata import AttentionMetadata, Span, is_visible
from quantkit.serve.kv_cache import KVShape
from quantkit_kernels import store_kv_cache

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
    if paged.cache is not None:
        key_cache, value_cache = paged.cache.caches[layer_index(module)]
        tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
        store_kv_cache(*tokens_first, key_cache, value_cache, paged.slot_mapping)
    outputs = [
        _attend(module, query, key, value, span, paged, scaling, sliding_window, softcap) for span in paged.spans
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: Span,
    paged: AttentionMetadata,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[span's tokens, H, D_v]."""
    here = slice(span.start, span.stop)
    if span.is_whole:
        queries, keys, values = query[:, :, here], key[:, :, here], value[:, :, here]
        is_plain = softcap is None and (window is None or window >= span.num_queries)
        mask = None if is_plain else span.whole_mask(window)
    else:
        assert paged.cache is not None, "without a cache every request is whole"
        layer = layer_index(module)
        where = span.key_range(window)
        if where.block_ids is None:
            keys, values = paged.cache.view(layer, where.first_slot, where.num_keys)
        else:
            keys, values = paged.cache.gather(layer, where.block_ids, where.num_seqs)
        keys, values, mask = keys.transpose(1, 2), values.transpose(1, 2), where.mask
        queries = query[0, :, here].unflatten(1, (where.num_seqs, span.num_queries)).transpose(0, 1)
    output = _scaled_dot_product(queries, keys, values, mask, scaling, softcap)
    return output.transpose(1, 2).flatten(0, 1)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """[n, H, q, D_v] from [n, H, q, D], [n, H_kv, k, D], [n, H_kv, k, D_v] and a mask [n, 1, q, k].

    Query heads that share keys are folded into one longer list of queries where that changes nothing else.
    """
    num_seqs, num_heads, num_queries, _ = query.shape
    groups = num_heads // key.shape[1]
    if num_queries == 1 or softcap is not None:
        folded = query.reshape(num_seqs, key.shape[1], groups * num_queries, -1)
        if softcap is None:
            output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        else:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            scores = softcap * torch.tanh(folded.float() @ key.float().transpose(-1, -2) * (scale / softcap))
            if mask is not None:
                scores += mask.repeat(1, 1, groups, 1) if num_queries > 1 else mask
            output = (scores.softmax(-1) @ value.float()).to(query.dtype)
        return output.reshape(num_seqs, num_heads, num_queries, -1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )


def register_attention() -> None:
    """Make our attention known to transformers as ``quantkit_paged``."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, paged_mask)
