"""Configurations of real models, typed in from their config.json, and facts made of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.capacity.model_facts import KVLayer, ModelFacts, Weight
from quantkit.capacity.read_facts import read_facts

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "sliding_window": 131072, "use_sliding_window": False,
        "max_window_layers": 28, "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "sliding_window": 32768, "use_sliding_window": False,
        "max_window_layers": 21, "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "attention_bias": False,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def real_config() -> Callable[[str], dict[str, Any]]:
    """``real_config(name)``: the config.json of a real model."""
    return lambda name: dict(CONFIGS[name])


@pytest.fixture(scope="session")
def write_config() -> Callable[..., Path]:
    """``write_config(folder, config)`` writes config.json alone."""

    def write(folder: Path, config: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def real_facts(tmp_path: Path, write_config: Callable[..., Path]) -> Callable[..., ModelFacts]:
    """``real_facts(name, **changes)``: facts of a real configuration, with some fields changed."""

    def facts(name: str, **changes: Any) -> ModelFacts:
        config = {key: value for key, value in {**CONFIGS[name], **changes}.items() if value != "absent"}
        return read_facts(str(write_config(tmp_path / name, config)))

    return facts


@pytest.fixture(scope="session")
def plain_facts() -> Callable[..., ModelFacts]:
    """``plain_facts(parameters, layers, kv_heads, head_dim)``: a model of one big matrix, for worked examples."""

    def facts(parameters: int, layers: int, kv_heads: int, head_dim: int) -> ModelFacts:
        return ModelFacts(
            name="example",
            model_type="llama",
            weights=(Weight("all", "linear", 1, parameters),),
            kv_layers=(KVLayer("full", kv_heads, head_dim, head_dim),) * layers,
            hidden_size=kv_heads * head_dim,
            intermediate_size=4 * kv_heads * head_dim,
            vocab_size=32000,
            num_heads=kv_heads,
        )

    return facts
