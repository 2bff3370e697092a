"""The plan: what it decides, and what it refuses before any weight is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.errors import RecipeError, SourceError
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.plan import Plan, make_plan
from quantkit.recipe import parse_recipe
from quantkit.scheme import PRESETS, QuantScheme

TEMPLATE = """\
version: 1
model: {model}
quantization:
  scheme: W4A16
  group_size: {group_size}
  algorithm: {{name: rtn}}
  ignore: {ignore}
outputs: [{{format: compressed-tensors, path: somewhere}}]
"""


def _plan(model: Path, group_size: int | str = "auto", ignore: str = "[lm_head]") -> Plan:
    return make_plan(parse_recipe(TEMPLATE.format(model=model, group_size=group_size, ignore=ignore)))


def test_auto_takes_the_largest_group_that_divides_every_layer(tiny_models: Callable[[str], Path]) -> None:
    plan = _plan(tiny_models("llama"))  # 64 and 128 columns
    assert {layer.scheme.group_size for layer in plan.layers} == {64}
    assert len(plan.layers) == 2 * 7
    assert plan.ignored == ("lm_head",)


def test_bytes_are_those_of_the_tensors(tiny_models: Callable[[str], Path]) -> None:
    plan = _plan(tiny_models("llama"), 32)
    layer = next(layer for layer in plan.layers if layer.name == "model.layers.1.mlp.down_proj")
    assert layer.shape == (64, 128)
    assert layer.block == 1
    assert layer.bytes_before == 64 * 128 * 4
    assert layer.bytes_after == 64 * 128 // 2 + 64 * 4 * 4 + 2 * 8  # codes, float32 scales, shape
    assert plan.bits_per_weight == pytest.approx(4 + 32 / 32, rel=0.02)
    document = plan.to_dict()
    assert document["layers"][0]["scheme"] == "W4A16 g32 symmetric"
    assert document["bytes_after"] == plan.bytes_after < plan.bytes_before


def test_no_weight_is_read(tiny_models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.source import ModelSource

    def refuse(self: ModelSource, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(ModelSource, "read", refuse)
    assert _plan(tiny_models("qwen3")).layers


@pytest.mark.parametrize(("family", "layers"), [("phi3", 8), ("gemma3", 14), ("qwen2", 14), ("mistral", 14)])
def test_every_family_has_its_layers(family: str, layers: int, tiny_models: Callable[[str], Path]) -> None:
    plan = _plan(tiny_models(family))
    assert len(plan.layers) == layers
    assert set(plan.copied) == {
        name for name in plan.source.tensors if name.removesuffix(".weight") not in plan.schemes
    }


@pytest.mark.parametrize(
    ("group_size", "ignore", "message"),
    [
        (128, "[lm_head]", r"128 does not divide the 64 input columns of model.layers.0.self_attn.q_proj"),
        ("auto", "[lm_head, lm_haed]", "'lm_haed' matches no layer"),
        ("auto", r"[lm_head, 'model\.layers\.1']", "matches no layer.*must match the whole name"),
        ("auto", "[]", "lm_head, which is outside the decoder blocks"),
        ("auto", "['.*']", "leaves no layer"),
        (
            "auto",
            r"[lm_head, '.*\.k_proj']",
            "splits a unit that engines fuse: .*k_proj is ignored and .*q_proj is W4A16",
        ),
    ],
)
def test_refusals(group_size: int | str, ignore: str, message: str, tiny_models: Callable[[str], Path]) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        _plan(tiny_models("llama"), group_size, ignore)
    assert "\n" not in str(caught.value)


def test_a_group_size_that_nothing_divides(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "odd", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(RecipeError, match=r"auto found none of 128, 64, 32 .*48 input columns.*channel"):
        _plan(folder)
    assert {layer.scheme.group_size for layer in _plan(folder, "channel").layers} == {-1}


def test_a_quantized_model_is_refused(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "quantized"
    shutil.copytree(tiny_models("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"quantized already \(gptq\)"):
        _plan(folder)


def _with_overrides(model: Path, overrides: str, output: str = "compressed-tensors", scheme: str = "W4A16") -> Plan:
    text = TEMPLATE.format(model=model, group_size="auto", ignore="[lm_head]").replace("W4A16", scheme)
    text = text.replace("compressed-tensors", output).replace("outputs", f"  overrides: {overrides}\noutputs")
    return make_plan(parse_recipe(text))


def test_the_last_override_that_matches_counts_and_each_finds_its_own_group_size(tiny_llama_folder: Path) -> None:
    overrides = r"""[{match: 'model\.layers\.1\..*', scheme: W8A16}, {match: '.*down_proj', scheme: W4A16_ASYM},
      {match: 'model.layers.0.self_attn.o_proj', scheme: none}]"""
    plan = _with_overrides(tiny_llama_folder, overrides)
    schemes = plan.schemes
    assert schemes["model.layers.0.mlp.up_proj"] == QuantScheme(4, 64)
    assert schemes["model.layers.1.mlp.up_proj"] == PRESETS["W8A16"]
    for block in (0, 1):
        assert schemes[f"model.layers.{block}.mlp.down_proj"] == QuantScheme(4, 128, symmetric=False)
    assert plan.ignored == ("model.layers.0.self_attn.o_proj", "lm_head")
    assert "model.layers.0.self_attn.o_proj.weight" in plan.copied


def test_a_weight_of_eight_bits_is_not_copied_though_its_name_stays(tiny_llama_folder: Path) -> None:
    plan = _with_overrides(tiny_llama_folder, "[]", scheme="W8A8")
    name = "model.layers.0.mlp.up_proj.weight"
    assert plan.specs[name] == TensorSpec(torch.int8, (128, 64))
    assert name not in plan.copied


@pytest.mark.parametrize(
    ("overrides", "output", "message"),
    [
        ("[{match: '.*doon_proj', scheme: none}]", "gptq", r"overrides\[0\]: '\.\*doon_proj' matches no layer"),
        ("[{match: lm_head, scheme: W8A16}]", "gptq", "'lm_head' matches no layer that is quantized"),
        ("[{match: '.*gate_proj', scheme: W8A16}]", "gptq",
         "splits a unit that engines fuse: .*gate_proj is W8A16 channel|up_proj is W4A16 .* gate_proj is W8A16"),
        ("[{match: '.*k_proj', scheme: none}]", "gptq", "k_proj is kept by an override and .*q_proj is W4A16 g64"),
        ("[{match: '.*o_proj', scheme: W4A16, group_size: 128}]", "gptq",
         r"overrides\[0\]\.group_size: 128 does not divide the 64 input columns of model.layers.0.self_attn.o_proj"),
        ("[{match: '.*o_proj', scheme: W4A16_ASYM}]", "awq", r"outputs\[0\]: awq holds one scheme for all layers"),
        ("[{match: '.*', scheme: none}]", "gptq", "leaves no layer to quantize"),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be(overrides: str, output: str, message: str, tiny_llama_folder: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        _with_overrides(tiny_llama_folder, overrides, output)
    assert "\n" not in str(caught.value)
