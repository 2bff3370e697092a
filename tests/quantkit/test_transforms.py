"""Transforms: folds leave every family's logits alone, are exact as stored, and make rounding hurt less."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantkit import architectures
from quantkit.architectures import ARCHITECTURES, UP_DOWN, VALUE_OUT, Architecture, Fold, find_decoder_blocks
from quantkit.calibration.activations import enter_blocks
from quantkit.errors import QuantizationError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.primitives import choose_qparams, dequantize, fake_quantize_input, quantize
from quantkit.recipe import parse_recipe
from quantkit.scheme import InputScheme, QuantScheme
from quantkit.transforms import fold_notes, load_transform, rewritten_parameters
from quantkit.transforms.fold_block import observe, transform_block
from quantkit.transforms.folding import applicable_folds, apply_fold, num_channels, to_channels, to_columns

SCHEME = QuantScheme(num_bits=4, group_size=32)
NUM_FOLDS = {"olmo2": 2, "olmo3": 2, "exaone4": 2, "cohere": 3, "mixtral": 2, "qwen2_moe": 3, "qwen3_moe": 2}
EXTRA: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi3": {"original_max_position_embeddings": 2048},
}


def _model(family: str, **settings: Any) -> nn.Module:
    """A tiny random model with uneven norms, biases and columns."""
    settings = (
        {
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
        }
        | EXTRA.get(family, {})
        | settings
    )
    if family in ("qwen2", "phi3", "qwen2_moe", "olmo2", "olmo3", "cohere", "exaone4"):
        settings.pop("head_dim")
    config = CONFIG_MAPPING[family](**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape)
        if "norm" in name:
            parameter.add_(0.3 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(0.15 * noise)
    return model.to(torch.bfloat16).float()  # what a checkpoint of the usual type holds


def _linears(block: nn.Module) -> dict[str, QuantScheme]:
    return {name: SCHEME for name, m in block.named_modules() if isinstance(m, nn.Linear) and "expert_gate" not in name}


def _windows(count: int = 6) -> Tensor:
    return torch.randint(1, 160, (count, 40), generator=torch.Generator().manual_seed(1))


def _batches(model: nn.Module, decoder: Any) -> Any:
    return enter_blocks(model, decoder, [(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in _windows().split(2)])


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_folds_of_every_family_leave_its_logits_alone(family: str) -> None:
    model = _model(family)
    decoder = find_decoder_blocks(model, family)
    with torch.inference_mode():
        expected = model(_windows()).logits
    changed = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    for block in decoder.blocks:
        folds = applicable_folds(family, block, _linears(block))
        assert len(folds) == NUM_FOLDS.get(family, 4)
        for fold in folds:
            scale = torch.empty(num_channels(fold, block)).uniform_(-3, 3, generator=generator).exp()
            apply_fold(fold, block, scale, torch.bfloat16)
    with torch.inference_mode():
        found = model(_windows()).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    linears = [f"{decoder.name}.{i}.{name}" for i, block in enumerate(decoder.blocks) for name in _linears(block)]
    stored = rewritten_parameters((load_transform("awq"),), decoder, linears, family)
    quantized = {f"{name}.weight" for name in linears}
    different = {name for name, p in model.named_parameters() if not torch.equal(p, changed[name])}
    assert different - quantized == stored
    for name in stored:  # written in storage dtype without loss
        assert torch.equal(model.get_parameter(name), model.get_parameter(name).to(torch.bfloat16).float())


def test_a_block_of_experts_with_a_dense_one_before_it_folds_both() -> None:
    model = _model("qwen3_moe", mlp_only_layers=[0])
    decoder = find_decoder_blocks(model, "qwen3_moe")
    folds = [applicable_folds("qwen3_moe", block, _linears(block)) for block in decoder.blocks]
    assert [len(found) for found in folds] == [4, 2]
    names = [f"{decoder.name}.{i}.{name}" for i, block in enumerate(decoder.blocks) for name in _linears(block)]
    notes = fold_notes((load_transform("awq"),), decoder, names, "qwen3_moe")
    assert notes[0] == (
        "awq: the fold post_attention_layernorm -> mlp.gate_proj, mlp.up_proj is passed over in 1 of 2 blocks"
    )


def test_layers_that_stay_as_they_are_keep_their_fold_off() -> None:
    block = find_decoder_blocks(_model("llama"), "llama").blocks[0]
    all_but_down = [name for name in _linears(block) if not name.endswith("down_proj")]
    assert UP_DOWN not in applicable_folds("llama", block, all_but_down)
    all_but_value = [name for name in _linears(block) if not name.endswith("v_proj")]
    found = applicable_folds("llama", block, all_but_value)
    assert VALUE_OUT not in found
    assert [fold.producer for fold in found] == ["post_attention_layernorm", "mlp.up_proj"]


def test_an_unknown_family_is_not_transformed_and_that_is_said() -> None:
    decoder = find_decoder_blocks(_model("llama"), "llama")
    names = [f"{decoder.name}.0.{name}" for name in _linears(decoder.blocks[0])]
    transforms = (load_transform("awq"), load_transform("smoothquant"))
    assert rewritten_parameters(transforms, decoder, names, "unheard-of") == frozenset()
    assert "awq, smoothquant: it is not known where" in fold_notes(transforms, decoder, names, "unheard-of")[0]
    assert fold_notes((), decoder, names, "unheard-of") == ()


def test_value_channels_are_shared_by_the_query_heads_of_their_group() -> None:
    block = find_decoder_blocks(_model("llama"), "llama").blocks[0]
    channels = torch.arange(32.0)  # two key/value heads of 16
    columns = to_columns(VALUE_OUT, block, channels)
    expected = torch.cat([channels[:16], channels[:16], channels[16:], channels[16:]])
    assert torch.equal(columns, expected)
    assert torch.equal(to_channels(VALUE_OUT, block, columns, largest=True), channels)
    assert torch.equal(to_channels(VALUE_OUT, block, torch.arange(64.0), largest=False)[:2], torch.tensor([8.0, 9.0]))


@pytest.mark.parametrize("value", [0.0, 3e-39])
def test_channels_that_cannot_be_scaled_are_left(value: float) -> None:
    block = find_decoder_blocks(_model("qwen2"), "qwen2").blocks[0]
    block.input_layernorm.weight[3] = value  # type: ignore[union-attr,operator,index]
    norm = applicable_folds("qwen2", block, _linears(block))[0]
    applied = apply_fold(norm, block, torch.full((64,), 1e3), torch.bfloat16)
    assert torch.isfinite(applied).all()
    assert float(applied[3]) == 1.0
    assert float(block.input_layernorm.weight[3]) == pytest.approx(value)  # type: ignore[union-attr,operator,index]


def test_a_fold_that_is_not_exact_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Architecture(folds=(Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj")), UP_DOWN))
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama", wrong)  # v_proj reads the norm too
    model = _model("llama")
    decoder = find_decoder_blocks(model, "llama")
    block = decoder.blocks[0]
    block.input_layernorm.weight[::9] *= 20  # type: ignore[union-attr,operator,index]
    batches = _batches(model, decoder)
    with pytest.raises(QuantizationError, match=r"awq: the fold input_layernorm -> .* changes what block 0 computes"):
        transform_block((load_transform("awq"),), "llama", block, 0, _linears(block), batches, torch.bfloat16)


def _outputs(block: nn.Module, names: tuple[str, ...], x: Tensor, scheme: QuantScheme | None) -> Tensor:
    """What the layers make of an input, weights (and inputs) rounded if there is a scheme."""
    parts = []
    for name in names:
        weight = block.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        if scheme is not None:
            scale, zero_point = choose_qparams(weight, scheme, torch.bfloat16)
            weight = dequantize(quantize(weight, scale, scheme, zero_point), scale, zero_point)
        given = x if scheme is None or scheme.input is None else fake_quantize_input(x, scheme.input)
        parts.append(given @ weight.T)
    return torch.cat(parts, -1)


@pytest.mark.parametrize(
    ("name", "scheme", "gain"),
    [
        ("awq", SCHEME, 0.9),
        ("awq", QuantScheme(4, 32, symmetric=False), 0.9),
        ("smoothquant", QuantScheme(8, -1, input=InputScheme()), 0.5),
    ],
    ids=["awq", "awq-asymmetric", "smoothquant"],
)
def test_transforms_lower_the_error_of_what_reads_outliers(name: str, scheme: QuantScheme, gain: float) -> None:
    model = _model("llama")
    decoder = find_decoder_blocks(model, "llama")
    block = decoder.blocks[0]
    block.input_layernorm.weight[::9] *= 30  # type: ignore[union-attr,operator,index]
    batches, names = _batches(model, decoder), architectures.QKV[:2]  # v_proj's rows are scaled by another fold
    seen: list[Tensor] = []

    def inputs() -> Tensor:
        seen.clear()
        handle = block.get_submodule(names[0]).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        observe(block, 0, [names[1]], batches, load_transform("awq").wanted)
        handle.remove()
        return torch.cat(seen)

    x = inputs()
    exact = _outputs(block, names, x, None)
    before = (_outputs(block, names, x, scheme) - exact).square().sum()
    schemes = dict.fromkeys(_linears(block), scheme)
    records = transform_block((load_transform(name),), "llama", block, 0, schemes, batches, torch.bfloat16)
    torch.testing.assert_close(_outputs(block, names, inputs(), None), exact, rtol=1e-3, atol=1e-3)
    after = (_outputs(block, names, inputs(), scheme) - exact).square().sum()
    assert after < gain * before
    record = records[names[0]][0]
    assert record["name"] == name
    assert record["fold"] == "input_layernorm -> self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"
    assert record["error_ratio"] < 1
    assert record["change"] <= 1e-4


def test_clipping_lowers_the_error_and_leaves_queries_and_keys_alone() -> None:
    model = _model("llama")
    decoder = find_decoder_blocks(model, "llama")
    block, batches = decoder.blocks[0], _batches(model, decoder)
    weights = {name: block.get_submodule(name).weight.clone() for name in _linears(block)}  # type: ignore[operator]
    awq = load_transform("awq", {"clip": True, "num_ratios": 1})
    folds = applicable_folds("llama", block, _linears(block))
    statistics = observe(block, 0, [fold.consumers[0] for fold in folds], batches, awq.wanted)
    assert awq.clip is not None
    for fold in folds:
        of_inputs = statistics[fold.consumers[0]]
        awq.clip(fold, block, _linears(block), of_inputs, torch.ones(num_channels(fold, block)), awq.options)
        for name in fold.consumers:
            new, old = block.get_submodule(name).weight, weights[name]
            assert isinstance(new, Tensor)
            assert torch.equal(new, old) == name.endswith(("q_proj", "k_proj"))
            assert (new.abs() <= old.abs() + 1e-6).all()
            hessian = of_inputs.hessian().float()

            def error(given: Tensor, exact: Tensor = old, hessian: Tensor = hessian) -> float:
                scale, zero_point = choose_qparams(given, SCHEME, torch.float32)
                difference = dequantize(quantize(given, scale, SCHEME, zero_point), scale, zero_point) - exact
                return float(((difference @ hessian) * difference).sum())

            assert error(new) <= 1.05 * error(old)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("awk", {}, "unknown transform 'awk'.*awq, smoothquant"),
        ("awq", {"ratio": 3}, "transform awq: .*ratio"),
        ("awq", {"num_ratios": 0}, "num_ratios=0"),
        ("smoothquant", {"alpha": 1.5}, "alpha=1.5"),
    ],
)
def test_wrong_transform_or_option_is_one_clear_line(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_transform(name, options)


RECIPE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {corpus}}}]
  num_tokens: 512
  window_tokens: 64
quantization:
  scheme: {scheme}
  algorithm: {{name: rtn}}
  transforms: [{transforms}]
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


@pytest.mark.parametrize(
    ("family", "dtype", "scheme", "tolerance"),
    [
        ("qwen2", torch.bfloat16, "W4A16", 0.02),  # the pipeline rounds weights to bfloat16, float32 readers do not
        ("llama", torch.float32, "W8A8", 1e-5),
        ("llama", torch.float32, "W8A8_STATIC", 1e-5),
    ],
)
def test_a_transformed_checkpoint_is_read_by_transformers(
    family: str,
    dtype: torch.dtype,
    scheme: str,
    tolerance: float,
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source = make_tiny_model(family, tmp_path / "model", dtype=dtype, hidden_size=128, head_dim=32)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The quick brown fox jumps over the lazy dog. A model reads the prompt and answers. " * 60)
    output = tmp_path / "out"
    text = RECIPE.format(model=source, corpus=corpus, scheme=scheme, transforms="awq, smoothquant", output=output)
    manifest = quantize_model(parse_recipe(text))
    names = [entry["name"] for entry in manifest["layers"][0]["transforms"]]
    assert names == ["awq", "smoothquant"]
    probe = manifest["probe"]
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([probe["token_ids"]])).logits[0]
    top = torch.tensor(probe["top_logits"])
    found = logits.gather(1, torch.tensor(probe["top_ids"]))
    assert (found - top).abs().max() < tolerance * top.abs().max()
