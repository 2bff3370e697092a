"""Parameters and layers from config.json and from headers, against models that transformers builds on meta."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.capacity.model_facts import ModelFacts
from quantkit.capacity.read_facts import read_facts
from quantkit.capacity.weight_shapes import FAMILIES
from quantkit.cli import main
from quantkit.errors import SourceError

TINY = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1],
                  "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": LATENT | {"q_lora_rank": 24},
}  # fmt: skip


def counted_by_transformers(config: Any) -> int:
    """Numbers of the model's parameters and stored buffers, a tied one once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum({id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_known_family_agree_with_transformers(
    family: str, tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    config = AutoConfig.for_model(family, **{**TINY, **EXTRA.get(family, {})})
    facts = read_facts(str(write_config(tmp_path, json.loads(config.to_json_string(use_diff=False)))))
    assert facts.parameters == counted_by_transformers(config)
    assert facts.tied == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the model cards count them; DeepSeek-V3 without its layer for further tokens
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-3-1b", 999_885_952),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameters_of_real_models(
    name: str, parameters: int, real_facts: Callable[..., ModelFacts], real_config: Callable[[str], dict[str, Any]]
) -> None:
    assert real_facts(name).parameters == parameters
    config = AutoConfig.for_model(**real_config(name))
    assert counted_by_transformers(config) == parameters


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral"])
def test_headers_and_configuration_count_the_same(
    family: str, tiny_models: Callable[[str], Path], tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    folder = tiny_models(family)
    by_headers = read_facts(str(folder))
    by_config = read_facts(str(write_config(tmp_path, json.loads((folder / "config.json").read_text()))))
    assert by_headers.counted_from == "safetensors headers"
    assert by_config.counted_from == "config.json"
    assert by_headers.parameters == by_config.parameters
    for role in ("linear", "expert", "embedding", "lm_head", "other"):
        assert by_headers.of_role(role) == by_config.of_role(role), role
    assert by_headers.stored_bytes == 4 * by_headers.parameters  # float32
    assert by_headers.kv_layers == by_config.kv_layers


def test_a_token_of_a_mixture_uses_its_experts_only(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("mixtral-8x7b")
    assert facts.multiplied == pytest.approx(12.75e9, rel=0.01)  # 12.9 B active, embeddings among them
    assert facts.active_share(1) == pytest.approx(2 / 8)
    assert facts.active_share(64) > 0.999


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma-3-1b", {"sliding": 22, "full": 4}),
        ("qwen2.5-7b", {"full": 28}),
        ("deepseek-v3", {"latent": 61}),
    ],
)
def test_kinds_of_layers(name: str, kinds: dict[str, int], real_facts: Callable[..., ModelFacts]) -> None:
    assert real_facts(name).to_dict()["layers_by_kind"] == kinds


def test_windows_follow_the_rules_of_the_families(real_facts: Callable[..., ModelFacts]) -> None:
    qwen = real_facts("qwen2.5-0.5b", use_sliding_window=True, sliding_window=4096)
    assert [layer.window for layer in qwen.kv_layers] == [None] * 21 + [4096] * 3
    mistral = real_facts("llama-3-8b", model_type="mistral", sliding_window=4096)
    assert {layer.kind for layer in mistral.kv_layers} == {"sliding"}
    gemma = real_facts("gemma-3-1b")
    assert [index for index, layer in enumerate(gemma.kv_layers) if layer.kind == "full"] == [5, 11, 17, 23]


def test_layers_that_share_or_keep_a_state(real_facts: Callable[..., ModelFacts]) -> None:
    shared = real_facts("llama-3-8b", num_kv_shared_layers=12)
    assert [layer.kind for layer in shared.kv_layers] == ["full"] * 20 + ["shared"] * 12
    hybrid = real_facts(
        "llama-3-8b", layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    assert hybrid.to_dict()["layers_by_kind"] == {"full": 8, "state": 24}
    # Qwen3-Next: a convolution over 2 x 16 x 128 + 32 x 128 channels of 4, and 32 states of 128 x 128
    assert hybrid.kv_layers[0].state_numbers == 8192 * 4 + 32 * 128 * 128


def test_an_unknown_family_is_counted_as_far_as_it_can_be(
    tmp_path: Path, write_config: Callable[..., Path], real_config: Callable[[str], dict[str, Any]]
) -> None:
    config = real_config("llama-3-8b") | {"model_type": "brandnew"}
    facts = read_facts(str(write_config(tmp_path, config)))
    assert facts.weights == ()
    assert [layer.width for layer in facts.kv_layers] == [2048] * 32
    assert any("weights are not counted" in note for note in facts.notes)
    assert any("brandnew is not known" in note for note in facts.notes)


def test_an_unknown_family_with_weights_is_counted_from_its_headers(
    tiny_models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_models("llama")
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "brandnew"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_facts(str(tmp_path)).parameters == read_facts(str(folder)).parameters


def test_a_gguf_is_read_from_its_header(smollm2_gguf: Path) -> None:
    facts = read_facts(str(smollm2_gguf))
    assert facts.parameters == 134_515_008
    assert (facts.num_layers, facts.kv_layers[0].heads, facts.kv_layers[0].key_dim) == (30, 3, 64)
    assert facts.tied
    assert facts.quantization == "gguf"


def test_all_parts_of_a_split_gguf_are_counted(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", hidden_size=256, head_dim=64)
    export = ["export", "gguf", str(folder), "--type", "F16", "--split-size", "0.0008", "-o", str(tmp_path / "m.gguf")]
    assert CliRunner().invoke(main, export).exit_code == 0
    first, second, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert read_facts(str(first)).parameters == read_facts(str(folder)).parameters
    with pytest.raises(SourceError, match=f"is one part of a split GGUF. Give the part 00001-of-0000{2 + len(others)}"):
        read_facts(str(second))
    second.unlink()
    with pytest.raises(SourceError, match=r"cannot read .*-00002-of-.*: No such file"):
        read_facts(str(first))


def test_a_method_that_is_not_known_is_said(real_facts: Callable[..., ModelFacts]) -> None:
    facts = real_facts("llama-3-8b", quantization_config={"quant_method": "bitsandbytes"})
    assert facts.parameters == 8_030_261_248
    assert facts.notes == ("bitsandbytes is not known: what its weights take as they are stored is not planned for",)


def test_a_packed_checkpoint_is_counted_from_its_configuration(
    write_rtn_checkpoint: Callable[..., Path], tiny_llama_folder: Path, tmp_path: Path
) -> None:
    facts = read_facts(str(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "packed")))
    assert facts.parameters == read_facts(str(tiny_llama_folder)).parameters
    assert facts.quantization == "compressed-tensors pack-quantized"
    stored = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert facts.stored_bytes is not None
    assert facts.stored_bytes <= stored < facts.stored_bytes + 10_000  # the header


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "absent"}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a whole number"),
        ({"num_hidden_layers": 10**9}, "is not a whole number from 1 to 10000"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
        ({"num_attention_heads": 24}, "hidden_size=4096 is not a multiple of num_attention_heads=24"),
        ({"model_type": "absent"}, "has no model_type"),
        ({"layer_types": ["full_attention"]}, "describes 1 layers, num_hidden_layers is 32"),
        ({"layer_types": ["odd"] * 32}, "a layer of the unknown kind 'odd'"),
        ({"num_kv_shared_layers": 32}, "leaves none of the 32 layers"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder model"),
        ({"layer_types": 5}, "the kinds of its layers are 5, which is no list"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings='many' is not a whole number"),
        ({"quantization_config": 7}, "quantization_config=7 is no JSON object"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "four"}}, "quantization_config is not understood"),
        ({"quantization_config": {"quant_method": "awq", "bits": 99}}, "says 99.0 bits"),
    ],
)
def test_impossible_configurations_are_one_clear_line(
    changes: dict[str, Any], message: str, real_facts: Callable[..., ModelFacts]
) -> None:
    with pytest.raises(SourceError) as caught:
        real_facts("llama-3-8b", **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_found(tmp_path: Path) -> None:
    for model, message in (
        (str(tmp_path / "nowhere" / "deep"), "no such folder"),
        (str(tmp_path / "gone.gguf"), "no such file"),
        ("nobody/nothing-here", "the hub cannot be reached"),
        (str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(SourceError, match=message):
            read_facts(model)
