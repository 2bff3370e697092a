"""The plan: what it decides, and what it refuses before any weight is read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import RecipeError, SourceError
from quantkit.plan import Plan, make_plan
from quantkit.recipe import parse_recipe

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


def test_tensors_of_mixtral_that_cannot_be_quantized_must_be_ignored(tiny_models: Callable[[str], Path]) -> None:
    with pytest.raises(RecipeError, match=r"model.layers.0.mlp.*is not supported yet.*ignore"):
        _plan(tiny_models("mixtral"))
    plan = _plan(tiny_models("mixtral"), ignore=r"['lm_head', '.*\.mlp\..*']")
    assert {layer.name.rpartition(".")[2] for layer in plan.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("group_size", "ignore", "message"),
    [
        (128, "[lm_head]", r"128 does not divide the 64 input columns of model.layers.0.self_attn.q_proj"),
        ("auto", "[lm_head, lm_haed]", "'lm_haed' matches no layer"),
        ("auto", r"[lm_head, 'model\.layers\.1']", "matches no layer.*must match the whole name"),
        ("auto", "[]", "lm_head, which is outside the decoder blocks"),
        ("auto", "['.*']", "leaves no layer"),
        ("auto", r"[lm_head, '.*\.k_proj']", r"splits a unit that engines fuse.*k_proj is ignored and .*q_proj is not"),
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
