"""The numbers of a model that llama.cpp needs, from config.json to GGUF's keys."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor
from transformers import PretrainedConfig

from quantkit.errors import UsageError
from quantkit.export_gguf.families import GgufFamily

FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6}


def add_hyperparameters(writer: GGUFWriter, config: PretrainedConfig, family: GgufFamily) -> list[str]:
    """Write what describes the model's shape.

    Args:
        writer: of the file.
        config: of the model.
        family: of the model.

    Returns:
        What llama.cpp will not do as the model does, a line each.
    """
    settings: Any = config
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(settings, "num_key_value_heads", None) or heads)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    part = _rope_parameters(settings).get("partial_rotary_factor") or getattr(settings, "partial_rotary_factor", None)
    writer.add_rope_dimension_count(int(head_dim * (part or 1)))
    _add_experts(writer, settings)
    _add_gemma(writer, settings, head_dim)
    _add_rope(writer, settings)
    return _add_window(writer, settings, family)


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_gemma(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    """Soft caps, and the one attention scale that llama.cpp assumes.

    Raises:
        UsageError: the model scales its attention differently.
    """
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    scalar = getattr(config, "query_pre_attn_scalar", None)
    allowed = {head_dim, config.hidden_size / config.num_attention_heads}
    if scalar is not None and scalar not in allowed:
        raise UsageError(f"llama.cpp cannot scale attention by query_pre_attn_scalar={scalar}, only by {head_dim}")


def _add_window(writer: GGUFWriter, config: Any, family: GgufFamily) -> list[str]:
    window = getattr(config, "sliding_window", None)
    layers = list(getattr(config, "layer_types", None) or ())
    if family.name == "phi3":
        writer.add_sliding_window(window or 0)  # llama.cpp asks for it; 0 is none
        return []
    if not window or window >= config.max_position_embeddings or not getattr(config, "use_sliding_window", True):
        return []
    if family.sliding_window:
        writer.add_sliding_window(window)
        every = FULL_ATTENTION_EVERY[family.name]
        kinds = [f"{'full' if number % every == 0 else 'sliding'}_attention" for number in range(1, len(layers) + 1)]
        return [] if layers == kinds else [f"llama.cpp attends to all tokens in every {every}th block, this model not"]
    return [f"llama.cpp ignores the sliding window of {window} tokens in a {family.name} model: longer texts differ"]


def _rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary settings of full attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return dict(parameters.get("full_attention") or parameters)


def _add_rope(writer: GGUFWriter, config: Any) -> None:
    """Base and scaling of rotary positions.

    Raises:
        UsageError: a scaling that llama.cpp does not know.
    """
    rope = _rope_parameters(config)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    local = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(original or config.max_position_embeddings)
    elif kind == "longrope":
        original = original or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(_long_attention_factor(stretch, original))
    elif kind not in ("default", "llama3"):
        raise UsageError(f"llama.cpp does not know rotary positions of type {kind!r}")


def _long_attention_factor(stretch: float, original: int) -> float:
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def rope_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """Factors of the rotary frequencies that llama.cpp reads as tensors; none for most models.

    Source: the frequencies of Llama 3.1 and of LongRoPE as transformers computes them.
    """
    settings: Any = config
    rope = _rope_parameters(settings)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": torch.tensor(rope[f"{length}_factor"], dtype=torch.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    return {"rope_freqs.weight": _llama3_factors(rope, head_dim)}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] what each frequency is divided by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** exponents
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()
