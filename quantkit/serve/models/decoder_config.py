"""Which decoders `decoder.Decoder` runs, as data, and what a configuration of transformers says in its terms.

A configuration is taken only if every key that its class declares is known here. Whatever else a config.json holds,
transformers' own definition of the family does not read either.
"""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig

# Keys that say nothing about how logits are computed, and those that the shapes of the weights say again.
IRRELEVANT = frozenset({
    "_name_or_path", "architectures", "attention_bias", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "id2label", "initializer_range",
    "intermediate_size", "is_encoder_decoder", "label2id", "max_window_layers", "mlp_bias", "model_type",
    "moe_intermediate_size", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "qkv_bias", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "shared_expert_intermediate_size", "tie_word_embeddings", "transformers_version",
    "use_cache",
})  # fmt: skip
READ = frozenset({
    "head_dim", "hidden_act", "hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size",
})  # fmt: skip
WINDOW = frozenset({
    "layer_types", "sliding_window", "use_sliding_window", "_sliding_window_pattern",
})  # fmt: skip
EXPERTS = frozenset({
    "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_local_experts",
})  # fmt: skip
GEMMA = frozenset({
    "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "query_pre_attn_scalar",
    "use_bidirectional_attention",
})  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")  # the last two up to their original length
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family does otherwise than Llama.

    Attributes:
        keys: of its configuration that are read beside those of Llama.
        windows: which layers have the sliding window: ``none``, ``all``, or those that layer_types names.
        norm_offset: what norms add to their weight.
        has_norms_behind: attention and feed-forward are followed by a norm, too.
        scales_embedding: embeddings are multiplied by the square root of the width.
        is_fused: qkv_proj and gate_up_proj are one weight each on disk.
        weighs_experts: the weights of the chosen experts are made to sum to 1, whatever the configuration says.
    """

    keys: frozenset[str] = frozenset()
    windows: Literal["none", "all", "by type"] = "none"
    norm_offset: float = 0.0
    has_norms_behind: bool = False
    scales_embedding: bool = False
    is_fused: bool = False
    weighs_experts: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(WINDOW, windows="all"),
    "qwen2": Family(WINDOW, windows="by type"),
    "qwen3": Family(WINDOW, windows="by type"),
    "smollm3": Family(WINDOW | {"no_rope_layers", "no_rope_layer_interval"}, windows="by type"),
    "phi3": Family(WINDOW | {"original_max_position_embeddings"}, windows="all", is_fused=True),
    "gemma": Family(GEMMA, norm_offset=1.0, scales_embedding=True),
    "gemma2": Family(GEMMA | WINDOW, "by type", 1.0, has_norms_behind=True, scales_embedding=True),
    "gemma3_text": Family(GEMMA | WINDOW, "by type", 1.0, has_norms_behind=True, scales_embedding=True),
    "mixtral": Family(WINDOW | EXPERTS, windows="all", weighs_experts=True),
    "qwen2_moe": Family(WINDOW | EXPERTS, windows="by type"),
    "qwen3_moe": Family(WINDOW | EXPERTS, windows="all"),
}


class UnknownDecoderError(Exception):
    """A configuration that `Decoder` does not run; the message is the reason, for a report."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a decoder does, but for its weights.

    Attributes:
        family: see `Family`.
        num_heads: H, of queries.
        num_kv_heads: H_kv; divides H.
        head_dim: D.
        eps: of the norms.
        scaling: factor of attention scores.
        attention_softcap: of the scores; None for none.
        logits_softcap: of the logits; None for none.
        activation: of the gate.
        embedding_scale: factor of the embeddings; None for 1.
        windows: for each layer, the places that a query sees, its own included; None is all before it.
        rope: for each layer, which frequencies it turns its heads by; None is not at all.
        num_experts_per_token: experts that each token goes to, where a layer has some.
        normalizes_experts: the weights of the chosen experts are made to sum to 1.
    """

    family: Family
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    attention_softcap: float | None
    logits_softcap: float | None
    activation: Activation
    embedding_scale: float | None
    windows: tuple[int | None, ...]
    rope: tuple[str | None, ...]
    num_experts_per_token: int
    normalizes_experts: bool


def read_decoder_config(config: PretrainedConfig) -> DecoderConfig:
    """What a configuration says.

    Raises:
        UnknownDecoderError: it says something that `Decoder` does not do.
    """
    values: Any = config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnknownDecoderError(f"{config.model_type} is not one of {', '.join(FAMILIES)}")
    unknown = set(type(config)().to_dict()) - IRRELEVANT - READ - family.keys
    if unknown:
        raise UnknownDecoderError(f"its configuration has the key {min(unknown)}")
    activation = getattr(config, "hidden_activation", None) or values.hidden_act
    if activation not in ACTIVATIONS:
        raise UnknownDecoderError(f"its activation {activation} is not one of {', '.join(ACTIVATIONS)}")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnknownDecoderError("its attention is not causal")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None and config.model_type != "gemma2":
        raise UnknownDecoderError(f"its configuration has attn_logit_softcapping={softcap}, which {config.model_type} "
                                  "does not use")  # fmt: skip
    head_dim = getattr(config, "head_dim", None) or values.hidden_size // values.num_attention_heads
    return DecoderConfig(
        family=family,
        num_heads=values.num_attention_heads,
        num_kv_heads=values.num_key_value_heads,
        head_dim=head_dim,
        eps=values.rms_norm_eps,
        scaling=(getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        attention_softcap=softcap,
        logits_softcap=getattr(config, "final_logit_softcapping", None),
        activation=ACTIVATIONS[activation],
        embedding_scale=values.hidden_size**0.5 if family.scales_embedding else None,
        windows=_windows(config, family),
        rope=_rope(config),
        num_experts_per_token=getattr(config, "num_experts_per_tok", None) or 0,
        normalizes_experts=family.weighs_experts or bool(getattr(config, "norm_topk_prob", False)),
    )


def _windows(config: PretrainedConfig, family: Family) -> tuple[int | None, ...]:
    values: Any = config
    window = getattr(config, "sliding_window", None)
    if family.windows == "none" or (family.windows == "all" and window is None):
        return (None,) * values.num_hidden_layers
    if family.windows == "all":
        has_window = (True,) * values.num_hidden_layers
    else:
        has_window = tuple(kind == "sliding_attention" for kind in values.layer_types)
        if other := set(values.layer_types) - {"sliding_attention", "full_attention"}:
            raise UnknownDecoderError(f"its layers are of the type {min(other)}")
    if any(has_window) and (not window or getattr(config, "use_sliding_window", True) is False):
        raise UnknownDecoderError(f"it has layers with a sliding window and sliding_window={window}")
    return tuple(window if has else None for has in has_window)


def _rope(config: PretrainedConfig) -> tuple[str | None, ...]:
    """The names of the frequencies, "" where there is one set of them."""
    values: Any = config
    parameters: dict[str, Any] = values.rope_parameters
    by_type = "rope_type" not in parameters
    for one in parameters.values() if by_type else [parameters]:
        kind = one.get("rope_type") if isinstance(one, dict) else one
        if kind not in ROPE_TYPES:
            raise UnknownDecoderError(f"its rope_type {kind} is not one of {', '.join(ROPE_TYPES)}")
    layers = range(values.num_hidden_layers)
    turned = getattr(config, "no_rope_layers", None) or [1] * len(layers)  # 1 for a layer that has it
    return tuple((values.layer_types[layer] if by_type else "") if turned[layer] else None for layer in layers)
