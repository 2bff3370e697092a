"""Experts of mixture models: linear layers that compute the same, are calibrated with their own tokens, and served."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.allocation.units import find_units
from quantkit.errors import CalibrationError, RecipeError
from quantkit.formats import Format, read_quantization_config
from quantkit.pipeline import quantize_model
from quantkit.plan import make_plan
from quantkit.recipe import Recipe, parse_recipe
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.source import open_source
from quantkit.source.experts import fused_weight, is_fused, linear_experts, router_names, why_not_linear
from quantkit.verify import verify_checkpoint
from quantkit.verify.engine_rules import engine_notes, vllm_problems
from quantkit.verify.independent_reader import stored_layers

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
ON_DISK = {  # a gate projection of the third expert
    "mixtral": "model.layers.0.block_sparse_moe.experts.2.w1",
    "qwen2_moe": "model.layers.0.mlp.experts.2.gate_proj",
    "qwen3_moe": "model.layers.0.mlp.experts.2.gate_proj",
}
TEMPLATE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: builtin}}]
  num_tokens: 512
  window_tokens: 64
quantization:
  scheme: {scheme}
  algorithm: {{name: {algorithm}}}
  {extra}
outputs:
{outputs}
"""
PROMPT = [1, 77, 130, 201, 9, 300, 45]
NUM_TOKENS = 12
MakeRecipe = Callable[..., Recipe]


def _recipe(
    model: Path, out: Path, scheme: str = "W4A16", algorithm: str = "gptq", extra: str = "", formats: str = ""
) -> Recipe:
    names = (formats or "compressed-tensors").split()
    outputs = "\n".join(f"  - {{format: {name}, path: {out / name}}}" for name in names)
    return parse_recipe(TEMPLATE.format(model=model, scheme=scheme, algorithm=algorithm, extra=extra, outputs=outputs))


@pytest.fixture
def recipe(tmp_path: Path) -> MakeRecipe:
    return lambda model, *args, **kwargs: _recipe(model, tmp_path / "out", *args, **kwargs)


@pytest.fixture(scope="module")
def families(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model with experts of 64 columns everywhere; made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = make_tiny_model(family, folder, intermediate_size=64)
        return made[family]

    return get


@pytest.fixture(scope="module")
def starving(families: Callable[[str], Path], make_tiny_model: Any, tmp_path_factory: Any) -> Path:
    """A model that sends no token to expert 3: one channel is large in every token, and the router looks at it."""
    folder: Path = make_tiny_model("qwen2_moe", tmp_path_factory.mktemp("starving"), num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 30.0
    tensors["model.layers.0.mlp.gate.weight"][3, 0] = -100.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- the module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_linear_experts_compute_what_fused_ones_do(family: str, families: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    source = open_source(families(family))
    model = source.skeleton(use_linear_experts=True)
    weights = source.weight_map(model)
    assert weights.tensor_name("model.layers.0.mlp.experts.2.gate_proj.weight") == f"{ON_DISK[family]}.weight"
    assert weights.unused == []
    source.materialize(model)
    reference = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    ids = torch.randint(3, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    expected = reference(ids).logits
    for calibrate in (None, "routed", "all_tokens"):
        for experts in linear_experts(model).values():
            experts.calibrate = calibrate
        assert (model(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_experts_that_are_computed_otherwise_stay_fused() -> None:
    from transformers import CONFIG_MAPPING

    from quantkit.source.skeleton import build_skeleton

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0}
    model = build_skeleton(CONFIG_MAPPING["gpt_oss"](**sizes, **heads), torch.float32)
    (fused,) = (module for module in model.modules() if is_fused(module))
    assert why_not_linear(fused) == "its experts have biases"
    fused.has_bias = False
    assert why_not_linear(fused) == "the weights of its experts are transposed"
    fused.is_transposed = False
    assert why_not_linear(fused) == "gate and up of its experts are interleaved" or fused.is_concatenated
    fused.is_concatenated = True
    assert why_not_linear(fused) == "its experts have an activation of their own"


def test_experts_that_are_fused_on_disk_must_be_ignored(
    families: Callable[[str], Path], recipe: MakeRecipe, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(families("qwen3_moe"), tmp_path / "fused"))
    tensors = load_file(folder / "model.safetensors")
    for prefix in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}.{number}.{part}.weight") for number in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RecipeError, match=r"0\.mlp\.experts, whose experts are not one tensor per expert on disk"):
        make_plan(recipe(folder))
    plan = make_plan(recipe(folder, extra=r"ignore: [lm_head, '.*\.mlp\.experts', '.*\.mlp\.gate']"))
    assert {layer.name.split(".")[3] for layer in plan.layers} == {"self_attn"}


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_of_every_expert_is_a_layer(
    family: str, families: Callable[[str], Path], recipe: MakeRecipe
) -> None:
    plan = make_plan(recipe(families(family)))
    experts = [layer for layer in plan.layers if ".experts." in layer.name]
    assert len(experts) == 2 * 4 * 3
    assert {layer.shape for layer in experts} == {(64, 64)}
    assert f"{ON_DISK[family]}.weight_packed" in plan.specs
    assert f"{ON_DISK[family]}.weight" not in plan.specs
    routers = list(router_names(plan.model))
    assert set(plan.ignored) == {"lm_head", *routers}
    assert len(routers) == (4 if family == "qwen2_moe" else 2)
    units = {unit.name: unit for unit in find_units(list(plan.layers))}
    assert len(units["model.layers.1.mlp.experts"].layers) == 12


def test_experts_are_ignored_together_by_their_name(families: Callable[[str], Path], recipe: MakeRecipe) -> None:
    plan = make_plan(recipe(families("mixtral"), extra=r"ignore: [lm_head, '.*\.mlp\.experts']"))
    assert {layer.name.split(".")[3] for layer in plan.layers} == {"self_attn"}
    assert len(plan.ignored) == 1 + 2 * 12 + 2
    names = [plan.engine_name(name) for name in plan.ignored]
    config = Format("compressed-tensors").quantization_config(plan.schemes, names)
    assert config["ignore"] == [
        *(rf"re:model\.layers\.{block}\.block_sparse_moe\.experts(?:\.|$)" for block in range(2)),
        "lm_head",
        *(f"model.layers.{block}.block_sparse_moe.gate" for block in range(2)),
    ]


@pytest.mark.parametrize(
    "extra",
    [
        r"overrides: [{match: '.*experts\.2\..*', scheme: W8A16}]",
        r"overrides: [{match: '.*layers\.1\.mlp\.experts\..*down_proj', scheme: none}]",
        r"ignore: [lm_head, '.*experts\.3\.up_proj']",
    ],
)
def test_experts_of_a_layer_share_one_scheme(extra: str, families: Callable[[str], Path], recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"splits the experts of a layer, which engines fuse.*mlp\.experts") as caught:
        make_plan(recipe(families("qwen3_moe"), extra=extra))
    assert "\n" not in str(caught.value)


def test_a_shared_expert_is_joined_as_a_dense_mlp_is(families: Callable[[str], Path], recipe: MakeRecipe) -> None:
    extra = "overrides: [{match: '.*shared_expert.gate_proj', scheme: W8A16}]"
    with pytest.raises(RecipeError, match=r"engines fuse: .*shared_expert\.up_proj is W4A16.*gate_proj is W8A16"):
        make_plan(recipe(families("qwen2_moe"), extra=extra))


def test_layers_may_differ_and_the_config_says_it_once_a_layer(
    families: Callable[[str], Path], recipe: MakeRecipe
) -> None:
    other = r"overrides: [{match: '.*layers\.1\.mlp\.experts\..*', scheme: W8A16}]"
    plan = make_plan(recipe(families("mixtral"), extra=other))
    schemes = {plan.name_on_disk(name): scheme for name, scheme in plan.schemes.items()}
    for form in ("compressed-tensors", "gptq"):
        written = Format(form).quantization_config(schemes, [plan.engine_name(name) for name in plan.ignored])
        text = json.dumps(written)
        assert text.count("experts") <= 2
        config = read_quantization_config(json.loads(text))
        for name, scheme in schemes.items():
            assert config.scheme_of(name) == scheme
        assert config.scheme_of("model.layers.1.block_sparse_moe.experts", "FusedMoE") == PRESETS["W8A16"]
        assert config.scheme_of("model.layers.1.block_sparse_moe.gate") is None


# --- calibration ----------------------------------------------------------------------------------------------------


def _records(manifest: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [layer for layer in manifest["layers"] if part in layer["name"]]


def test_an_expert_that_sees_too_few_tokens_is_an_error(starving: Path, recipe: MakeRecipe) -> None:
    wanted = r"block 0, mlp\.experts: expert 3 sees 0 calibration tokens and needs 64.*\. Calibrate with more tokens"
    with pytest.raises(CalibrationError, match=wanted) as caught:
        quantize_model(recipe(starving))
    assert "experts to {calibrate: all_tokens}" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CalibrationError, match=r"needs 5000 \(and 3 more of 4\)"):
        quantize_model(recipe(starving, extra="experts: {min_tokens: 5000}"))


def test_all_tokens_calibrate_every_expert(starving: Path, recipe: MakeRecipe) -> None:
    manifest = quantize_model(recipe(starving, extra="experts: {calibrate: all_tokens}"))
    experts = _records(manifest, ".experts.")
    assert len(experts) == 12
    assert {layer["input_tokens"] for layer in experts} == {512}
    assert all(0 < layer["relative_output_error"] < 0.05 and not layer["fallbacks"] for layer in experts)
    report = verify_checkpoint(recipe(starving).outputs[0].path, open_source(starving))
    assert report.failed() == [], report  # the block's outputs kept the true routing


def test_a_target_is_corrected_for_experts_that_see_all_tokens(
    families: Callable[[str], Path], recipe: MakeRecipe, tmp_path: Path
) -> None:
    extra = "experts: {calibrate: all_tokens}"
    algorithm = "gptq, target_correction: {apply: always, skip: []}"
    layers = quantize_model(recipe(families("mixtral"), algorithm=algorithm, extra=extra))["layers"]
    kept = {layer["name"]: layer["stages"]["target_correction"]["kept"] for layer in layers}
    assert all(kept.values())
    assert any(".experts.3.down_proj" in name for name in kept)


def test_without_statistics_no_token_is_needed(starving: Path, recipe: MakeRecipe) -> None:
    manifest = quantize_model(recipe(starving, algorithm="rtn"))
    assert {layer["input_tokens"] for layer in _records(manifest, ".experts.")} == {None}
    with pytest.raises(CalibrationError, match="expert 3 sees 0"):
        quantize_model(recipe(starving, algorithm="rtn, search: true"), overwrite=True)


@pytest.mark.parametrize(
    ("scheme", "reason", "fix"),
    [
        ("W8A8_STATIC", "vLLM takes experts with dynamic 8-bit inputs only", "such as W4A16 or W8A8"),
        ("W4A16_ASYM", "vLLM reads no zero points of experts from compressed-tensors", "or write gptq"),
    ],
)
def test_what_no_engine_reads_of_experts_is_refused_beforehand(
    families: Callable[[str], Path], recipe: MakeRecipe, scheme: str, reason: str, fix: str
) -> None:
    with pytest.raises(RecipeError, match=rf"outputs\[0\]: {reason}, and .*experts\.0\.") as caught:
        make_plan(recipe(families("qwen3_moe"), scheme=scheme, algorithm="rtn"))
    assert fix in str(caught.value)
    spared = "overrides: [{match: '.*experts.*', scheme: W8A8}]"
    make_plan(recipe(families("qwen3_moe"), scheme="W8A8_STATIC", algorithm="rtn", extra=spared))
    make_plan(recipe(families("qwen3_moe"), scheme="W4A16_ASYM", algorithm="rtn", formats="gptq"))


def test_min_tokens_goes_with_routed_tokens(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"experts\.min_tokens: every expert sees all tokens"):
        _recipe(tmp_path, tmp_path, extra="experts: {calibrate: all_tokens, min_tokens: 3}")


def test_an_interrupted_run_resumes_to_the_same_bytes(families: Callable[[str], Path], tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 20:  # among the experts of the second block
            raise KeyboardInterrupt

    make = partial(_recipe, families("qwen3_moe"))
    whole = quantize_model(make(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        quantize_model(make(tmp_path / "out"), resume=True, progress=interrupt)
    resumed = quantize_model(make(tmp_path / "out"), resume=True)
    assert resumed["files"] == whole["files"]
    assert resumed["probe"] == whole["probe"]


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(
    families: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """A family's checkpoint of one format and its record; every recipe is run once."""
    made: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def get(family: str, scheme: str, algorithm: str, form: str) -> tuple[Path, dict[str, Any]]:
        key = (family, scheme, algorithm)
        if key not in made:
            out = tmp_path_factory.mktemp("checkpoints")
            formats = "compressed-tensors gptq awq" if scheme == "W4A16" else "compressed-tensors"
            extra = "group_size: 32" if scheme == "W4A16" else ""
            manifest = quantize_model(_recipe(families(family), out, scheme, algorithm, extra, formats))
            made[key] = out, manifest
        out, manifest = made[key]
        return out / form, manifest

    return get


CHECKPOINTS = [
    ("mixtral", "W4A16", "gptq", "compressed-tensors"),
    ("mixtral", "W4A16", "gptq", "gptq"),
    ("mixtral", "W4A16", "gptq", "awq"),
    ("qwen2_moe", "W4A16", "gptq", "compressed-tensors"),
    ("qwen3_moe", "W4A16", "rtn", "gptq"),
    ("qwen3_moe", "W8A8", "rtn", "compressed-tensors"),
]


@pytest.mark.parametrize(("family", "scheme", "algorithm", "form"), CHECKPOINTS)
def test_a_checkpoint_is_read_back(
    family: str, scheme: str, algorithm: str, form: str, quantized: Any, families: Callable[[str], Path]
) -> None:
    folder, manifest = quantized(family, scheme, algorithm, form)
    report = verify_checkpoint(folder, open_source(families(family)))
    assert report.failed() == [], report
    found = {check.name: check.detail for check in report.checks}
    readers = {"W4A16": "transformers loads it through compressed-tensors", "W8A8": "compressed-tensors unpacks its"}
    assert found["reader"].startswith(readers[scheme] if form == "compressed-tensors" else "an independent decoder")
    assert ("logits" in found) == (scheme == "W4A16")
    if algorithm == "gptq":
        tokens = [layer["input_tokens"] for layer in _records(manifest, "layers.0.mlp.experts.")]
        assert len(tokens) == 12
        assert sum(tokens) == 3 * 2 * 512  # two experts a token
        assert all(not layer["fallbacks"] for layer in manifest["layers"])


@pytest.mark.parametrize(("family", "scheme", "algorithm", "form"), CHECKPOINTS)
def test_the_engine_answers_as_the_dequantized_model(
    family: str, scheme: str, algorithm: str, form: str, quantized: Any, families: Callable[[str], Path]
) -> None:
    folder, _ = quantized(family, scheme, algorithm, form)
    engine = Engine(folder, EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=2))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (completion,) = engine.generate([PROMPT], params)
    assert list(completion.token_ids) == _greedy(folder, families(family))


@torch.inference_mode()
def _greedy(folder: Path, original: Path) -> list[int]:
    """What transformers' own fused model answers with the weights that the checkpoint stands for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    checkpoint = open_source(folder)
    assert checkpoint.quantization is not None
    config = read_quantization_config(checkpoint.quantization)
    quantizes = any(scheme.input is not None for scheme in config.schemes)
    if quantizes:  # inputs of experts are quantized inside them
        model = open_source(original).skeleton(use_linear_experts=True)
        open_source(original).materialize(model)
    for layer in stored_layers(checkpoint, config, checkpoint.skeleton(use_linear_experts=True)):
        weight = layer.weight.dequantize(torch.float32)
        if quantizes or ".experts." not in layer.name:
            module = model.get_submodule(layer.name)
            module.weight.copy_(weight)
            if quantizes:
                module.register_forward_pre_hook(lambda _, args: (_as_codes(args[0]),))
            continue
        experts, number, part = layer.name.rsplit(".", 2)
        fused_weight(model.get_submodule(experts), int(number), part).copy_(weight)
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def test_an_allocation_treats_the_experts_of_a_layer_alike(
    families: Callable[[str], Path], recipe: MakeRecipe, tmp_path: Path
) -> None:
    manifest = quantize_model(recipe(families("mixtral"), algorithm="rtn", extra="target_bits: 6"))
    assert manifest["allocation"]["bits"] <= 6
    units = {row["unit"]: row["chosen"] for row in manifest["allocation"]["units"]}
    for block in range(2):
        experts = f"model.layers.{block}.mlp.experts"
        assert {layer["scheme"] for layer in _records(manifest, f"{experts}.")} == {units[experts]}
    report = verify_checkpoint(tmp_path / "out" / "compressed-tensors", open_source(families("mixtral")))
    assert report.failed() == [], report


def test_tuning_follows_into_experts(families: Callable[[str], Path], recipe: MakeRecipe, tmp_path: Path) -> None:
    tuning = "tuning: {steps: 4, tokens_per_step: 256, learning_rate: 0.005}"
    manifest = quantize_model(recipe(families("qwen3_moe"), extra=tuning))
    assert manifest["tuning"]["history"]
    report = verify_checkpoint(tmp_path / "out" / "compressed-tensors", open_source(families("qwen3_moe")))
    assert report.failed() == [], report


def _as_codes(x: Tensor) -> Tensor:
    """Rounded as the engine rounds its inputs: 127 steps to the largest of a token."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scale).round() * scale


# --- what engines ask -----------------------------------------------------------------------------------------------


def _stored(scheme: QuantScheme, form: str = "compressed-tensors") -> tuple[Any, dict[str, tuple[int, int]]]:
    experts = [f"model.layers.0.mlp.experts.{number}" for number in range(2)]
    shapes = {f"{name}.{part}": (192, 256) for name in experts for part in ("gate_proj", "up_proj")}
    shapes |= {f"{name}.down_proj": (256, 192) for name in experts}
    config = Format(form).quantization_config(dict.fromkeys(shapes, scheme), ["lm_head"])
    return read_quantization_config(config), shapes


def test_rules_of_experts() -> None:
    config, shapes = _stored(QuantScheme(4, 32))
    assert vllm_problems(config, list(shapes)) == []
    notes = engine_notes(config, torch.bfloat16, shapes)
    assert not any("Marlin" in note for note in notes)
    assert any("over 1 or 2 GPUs" in note for note in notes)  # 192 columns are 6 groups of 32
    config, shapes = _stored(QuantScheme(4, 64, symmetric=False))
    assert "no zero points of experts" in vllm_problems(config, list(shapes))[0]
    assert vllm_problems(_stored(QuantScheme(4, 64, symmetric=False), "gptq")[0], list(shapes)) == []
    config, shapes = _stored(PRESETS["W8A8_STATIC"])
    assert "dynamic 8-bit inputs only" in vllm_problems(config, list(shapes))[0]


def test_experts_that_config_json_splits() -> None:
    schemes = {f"a.experts.0.{part}": QuantScheme(4, 32) for part in ("gate_proj", "up_proj", "down_proj")}
    with pytest.raises(ValueError, match=r"a\.experts holds W8A16"):
        Format("compressed-tensors").quantization_config(schemes | {"a.experts.1.up_proj": PRESETS["W8A16"]}, [])
    groups = (((r"re:.*experts\.0\.",), QuantScheme(4, 32)), (("Linear",), PRESETS["W8A16"]))
    stored, _ = _stored(QuantScheme(4, 32))
    names = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.1.up_proj"]
    (problem,) = vllm_problems(replace(stored, groups=groups), names)
    assert problem.startswith("vLLM fuses model.layers.0.mlp.experts, where ")
