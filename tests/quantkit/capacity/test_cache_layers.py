"""What each layer keeps of a sequence, against the caches that transformers fills when it runs the model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.capacity.model_facts import KVLayer
from quantkit.capacity.read_facts import read_facts

TOKENS = 40
BASE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ALTERNATING = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": ALTERNATING,
    "cohere2": ALTERNATING,
    "gemma3n_text": ALTERNATING
    | {
        "num_kv_shared_layers": 2, "intermediate_size": [128] * 4, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
    },
    "qwen3_next": EXPERTS
    | {
        "head_dim": 16, "full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": MAMBA | {"head_dim": 16, "mamba_d_ssm": 128},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "jamba": EXPERTS
    | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
}  # fmt: skip


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors of a cache layer, wherever it keeps them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def kept(layer: KVLayer) -> int:
    """Numbers that a layer keeps of `TOKENS` tokens; a window as transformers keeps it: the next token is one of it."""
    tokens = TOKENS if layer.window is None else min(TOKENS, layer.window - 1)
    return tokens * layer.width + layer.state_numbers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_keep_what_transformers_keeps(family: str, tmp_path: Path, write_config: Callable[..., Path]) -> None:
    config = AutoConfig.for_model(family, **BASE | FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + TOKENS)[None], use_cache=True).past_key_values
    found = [
        sum(tensor.numel() for name, value in vars(layer).items() if not name.startswith("_") for tensor in
            tensors_in(value))
        for layer in cache.layers
    ]  # fmt: skip
    facts = read_facts(str(write_config(tmp_path, json.loads(config.to_json_string(use_diff=False)))))
    assert [kept(layer) for layer in facts.kv_layers] == found
