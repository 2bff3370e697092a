"""Which layers keep what of a sequence, from config.json: windows, sharing, MLA, linear attention.

Source: the configuration classes of transformers, whose rules for layers these are.
"""

from collections.abc import Callable

from quantkit.capacity.config_fields import ConfigFields
from quantkit.capacity.model_facts import KVLayer
from quantkit.errors import SourceError

FULL = frozenset({"full_attention", "full", "attention", "*", "global", "compressed_attention"})
SLIDING = frozenset({"sliding_attention", "chunked_attention", "sliding", "local"})
STATE = frozenset({"linear_attention", "mamba", "mamba2", "M", "conv", "recurrent"})
BOTH = frozenset({"hybrid"})  # attention and a state in one layer
NOTHING = frozenset({"-", "mlp", "moe", "E"})
ALWAYS_HYBRID = frozenset({"falcon_h1"})
ALWAYS_SLIDING = frozenset({"mistral", "mixtral", "phi3", "starcoder2", "ministral"})  # wherever a window is given

# family -> (number of a layer, its fields) -> True if it slides
SLIDES: dict[str, Callable[[int, ConfigFields], bool]] = {
    "gemma2": lambda i, _: i % 2 == 0,
    "gpt_oss": lambda i, _: i % 2 == 0,
    "gemma3_text": lambda i, fields: bool((i + 1) % fields.integer("sliding_window_pattern")),
    "cohere2": lambda i, fields: bool((i + 1) % fields.integer("sliding_window_pattern")),
    "llama4_text": lambda i, _: bool((i + 1) % 4),
}


def kv_layers(fields: ConfigFields) -> tuple[KVLayer, ...]:
    """What each layer keeps.

    Raises:
        SourceError: a field is missing, impossible, or names a kind of layer that is not known.
    """
    kinds = _layer_types(fields)
    attention = _attention(fields)
    layers: list[KVLayer] = []
    for kind in kinds:
        if kind in FULL:
            layers.append(attention)
        elif kind in SLIDING:
            window = fields.optional("sliding_window") or fields.integer("attention_chunk_size")
            layers.append(KVLayer("sliding", attention.heads, attention.key_dim, attention.value_dim, window))
        elif kind in STATE:
            layers.append(KVLayer("state", state_numbers=_state_numbers(fields)))
        elif kind in BOTH:
            numbers = _state_numbers(fields)
            layers.append(
                KVLayer("full", attention.heads, attention.key_dim, attention.value_dim, state_numbers=numbers)
            )
        elif kind in NOTHING:
            layers.append(KVLayer("state"))
        else:
            known = ", ".join(sorted(FULL | SLIDING | STATE | BOTH | NOTHING))
            raise SourceError(f"{fields.where}: a layer of the unknown kind {kind!r}", fix=f"Known are {known}")
    return _share(layers, fields)


def _attention(fields: ConfigFields) -> KVLayer:
    """A layer that keeps every token."""
    rank = fields.optional("kv_lora_rank")
    if rank is not None:
        rope = fields.integer("qk_rope_head_dim")
        key = fields.integer("qk_nope_head_dim") + rope
        expanded = fields.num_heads * (key + fields.integer("v_head_dim"))
        return KVLayer("latent", 1, rank + rope, 0, expanded_width=expanded)
    return KVLayer("full", fields.num_kv_heads, fields.head_dim, fields.optional("v_head_dim") or fields.head_dim)


def _layer_types(fields: ConfigFields) -> list[str]:
    """The kind of every layer, in the words of whatever key the file uses."""
    count = fields.num_layers
    given = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("hybrid_override_pattern")
    if given is not None:
        if not isinstance(given, list | str):
            raise SourceError(f"{fields.where}: the kinds of its layers are {given!r}, which is no list")
        if len(given) != count:
            raise SourceError(f"{fields.where} describes {len(given)} layers, num_hidden_layers is {count}")
        return [str(kind) for kind in given]
    if fields.model_type in ALWAYS_HYBRID:
        return ["hybrid"] * count
    attends = fields.get("attn_layer_indices")
    if isinstance(attends, list):  # Bamba
        return ["attention" if i in attends else "mamba" for i in range(count)]
    interval = fields.optional("full_attention_interval")
    if interval:
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    period = fields.optional("attn_layer_period")
    if period:  # Jamba
        offset = fields.get("attn_layer_offset") or 0
        return ["attention" if i % period == offset else "mamba" for i in range(count)]
    if fields.get("attention_chunk_size") is None and fields.optional("sliding_window") is None:
        return ["full_attention"] * count
    return ["sliding_attention" if _slides(i, fields) else "full_attention" for i in range(count)]


def _slides(index: int, fields: ConfigFields) -> bool:
    if fields.model_type in SLIDES:
        return SLIDES[fields.model_type](index, fields)
    if fields.model_type in ALWAYS_SLIDING:
        return True
    if "use_sliding_window" in fields.raw:  # Qwen
        first = fields.get("max_window_layers") or 0
        return bool(fields.raw["use_sliding_window"]) and index >= first
    note = f"{fields.model_type} has a sliding_window, which layers use it is not known: all are counted as full"
    if note not in fields.notes:
        fields.notes.append(note)
    return False


def _share(layers: list[KVLayer], fields: ConfigFields) -> tuple[KVLayer, ...]:
    """Layers that read the keys and values of an earlier one keep none."""
    shared = fields.optional("num_kv_shared_layers") or 0
    factor = fields.optional("cla_share_factor") if fields.get("use_cla") else None
    if shared >= len(layers):
        raise SourceError(f"{fields.where}: num_kv_shared_layers={shared} leaves none of the {len(layers)} layers")
    first = len(layers) - shared
    return tuple(
        KVLayer("shared") if index >= first or (factor and index % factor) else layer
        for index, layer in enumerate(layers)
    )


def _state_numbers(fields: ConfigFields) -> int:
    """Numbers of the fixed state of a layer of linear attention or Mamba; 0 with a note where they are not known."""
    if fields.get("linear_num_value_heads"):  # gated delta net: Qwen3-Next
        keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
        heads, value_dim = fields.integer("linear_num_value_heads"), fields.integer("linear_value_head_dim")
        convolved = 2 * keys + heads * value_dim
        return convolved * fields.integer("linear_conv_kernel_dim", 4) + heads * value_dim * fields.integer(
            "linear_key_head_dim"
        )
    if fields.get("conv_L_cache"):  # LFM2: a short convolution
        return fields.integer("hidden_size") * fields.integer("conv_L_cache")
    size = fields.optional("mamba_d_state") or fields.optional("ssm_state_size")
    if size:
        kernel = fields.optional("mamba_d_conv") or fields.integer("conv_kernel", 4)
        heads_count = fields.optional("mamba_n_heads") or fields.optional("mamba_num_heads")
        width = fields.optional("mamba_d_head") or fields.optional("mamba_head_dim")
        expanded = fields.integer("hidden_size") * (fields.optional("mamba_expand") or fields.integer("expand", 2))
        inner = heads_count * width if heads_count and width else fields.optional("mamba_d_ssm") or expanded
        groups = (fields.optional("mamba_n_groups") or fields.optional("n_groups") or 0) if heads_count else 0
        return (inner + 2 * groups * size) * kernel + inner * size
    note = f"the state of {fields.model_type}'s layers without attention is not counted"
    if note not in fields.notes:
        fields.notes.append(note)
    return 0
