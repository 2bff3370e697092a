"""Several checkpoints from one solve: the same weights in each, whole or not at all, resumed together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit import pipeline
from quantkit.checkpoint import folder as checkpoint_folder
from quantkit.errors import CalibrationError, CheckpointError, QuantizationError, RecipeError, SourceError
from quantkit.formats import read_quantization_config
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe
from quantkit.source import open_source
from quantkit.verify import verify_checkpoint
from quantkit.verify.independent_reader import stored_layers

FORMATS = ("compressed-tensors", "gptq", "awq")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. A model reads the prompt and answers. " * 40)
    return path


@pytest.fixture
def make_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(
        model: Path, scheme: str = "W4A16", formats: tuple[str, ...] = FORMATS, extra: str = "", options: str = ""
    ) -> Recipe:
        outputs = "".join(f"  - {{format: {form}, path: {tmp_path / form}{options}}}\n" for form in formats)
        return parse_recipe(
            f"version: 1\nmodel: {model}\n"
            f"calibration: {{sources: [{{kind: text, path: {corpus}}}], num_tokens: 512, window_tokens: 64}}\n"
            f"quantization:\n  scheme: {scheme}\n  algorithm: {{name: rtn}}\n{extra}outputs:\n{outputs}"
        )

    return make


@pytest.fixture(scope="module")
def bf16_model(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("bf16") / "m", dtype=torch.bfloat16)


def changed(model: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other tensors."""
    import shutil

    folder = Path(shutil.copytree(model, target))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_every_output_holds_the_same_weights(
    scheme: str, bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    manifest = quantize_model(make_recipe(bf16_model, scheme))
    source = open_source(bf16_model)
    read: list[dict[str, torch.Tensor]] = []
    for form in FORMATS:
        report = verify_checkpoint(tmp_path / form, source)
        assert report.failed() == [], report
        own = json.loads((tmp_path / form / "quantkit.json").read_text())
        assert own["format"] == form
        assert own["layers"] == manifest["layers"]
        checkpoint = open_source(tmp_path / form)
        assert checkpoint.quantization is not None
        config = read_quantization_config(checkpoint.quantization)
        layers = stored_layers(checkpoint, config, checkpoint.skeleton())
        read.append({layer.name: layer.weight.dequantize() for layer in layers})
    assert len(read[0]) == 14
    for other in read[1:]:
        assert other.keys() == read[0].keys()
        assert all(torch.equal(other[name], read[0][name]) for name in other)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)


def test_a_float32_model_finds_its_scales_in_float16_for_formats_that_store_them_so(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(tiny_llama_folder))
    name = "model.layers.0.mlp.down_proj"
    ours = load_file(tmp_path / "compressed-tensors/model.safetensors")[f"{name}.weight_scale"]
    assert ours.dtype == torch.float32
    assert torch.equal(ours.t(), load_file(tmp_path / "gptq/model.safetensors")[f"{name}.scales"].float())
    for form in FORMATS:
        assert verify_checkpoint(tmp_path / form, open_source(tiny_llama_folder)).failed() == []


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8_STATIC"])
def test_eight_bit_inputs_pass_every_check_and_static_scales_are_shared(
    scheme: str, bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(bf16_model, scheme, FORMATS[:1]))
    out = tmp_path / "compressed-tensors"
    assert verify_checkpoint(out, open_source(bf16_model)).failed() == []
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("input_scale")}
    assert len(scales) == (14 if scheme == "W8A8_STATIC" else 0)
    for unit in (("self_attn", "qkv"), ("mlp", ["gate", "up"])) if scales else ():
        found = {float(scales[f"model.layers.1.{unit[0]}.{part}_proj.input_scale"]) for part in unit[1]}
        assert len(found) == 1


def test_overrides_mix_schemes_in_one_checkpoint(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    extra = "  overrides: [{match: '.*down_proj', scheme: W8A8}, {match: '.*layers.0.*o_proj', scheme: none}]\n"
    quantize_model(make_recipe(bf16_model, formats=FORMATS[:1], extra=extra))
    out = tmp_path / "compressed-tensors"
    report = verify_checkpoint(out, open_source(bf16_model))
    assert report.failed() == [], report
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["model.layers.0.self_attn.o_proj", "lm_head"]
    kept = load_file(out / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(kept, load_file(bf16_model / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"])


def test_each_output_has_its_own_shard_size(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(bf16_model, options=", max_shard_size: 50KB"))
    for form in FORMATS:
        shards = sorted((tmp_path / form).glob("model-*.safetensors"))
        assert len(shards) >= 2
        assert all(path.stat().st_size < 60_000 for path in shards)
        index = json.loads((tmp_path / form / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {path.name for path in shards}


def test_interrupted_together_resumed_together(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize_model(make_recipe(bf16_model))
    files = {form: (tmp_path / form / "model.safetensors").read_bytes() for form in FORMATS}
    (tmp_path / "gptq/quantkit.json").unlink()  # otherwise they are finished, and there is nothing to do

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    recipe = make_recipe(bf16_model)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(recipe, overwrite=True, resume=True, progress=interrupt)
    assert (tmp_path / "gptq.partial").is_dir()
    seen: list[int] = []
    resumed = quantize_model(recipe, overwrite=True, resume=True, progress=lambda stage, done, total: seen.append(done))
    assert seen[0] == 7
    assert resumed["files"] == whole["files"]
    assert {form: (tmp_path / form / "model.safetensors").read_bytes() for form in FORMATS} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)


def test_stopped_while_the_files_get_their_names_it_resumes(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(bf16_model)

    def stop(outputs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "take_places", stop)
        patch.setattr(pipeline.Journal, "remove", lambda journal: None)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(recipe, resume=True)
    quantize_model(recipe, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)
    assert verify_checkpoint(tmp_path / "awq", load_model=False).ok


def test_a_failure_of_one_output_leaves_none(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that float16 lacks stops the run, and a folder that cannot be renamed undoes the renaming."""

    def huge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e7

    model = changed(bf16_model, tmp_path / "huge", huge)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj: gptq stores scales in float16, .* overflows. Write compr"):
        quantize_model(make_recipe(model))
    assert [path.name for path in tmp_path.iterdir()] == ["huge"]
    (tmp_path / "compressed-tensors").mkdir()
    (tmp_path / "compressed-tensors/mine").write_text("precious")
    rename = checkpoint_folder.os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "awq":
            raise PermissionError(13, "Permission denied", str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(checkpoint_folder.os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot rename .*awq.partial to .*awq: Permission denied"):
        quantize_model(make_recipe(bf16_model), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compressed-tensors", "huge"]
    assert (tmp_path / "compressed-tensors/mine").read_text() == "precious"


# --- bad input ------------------------------------------------------------------------------------------------------


def test_outliers_and_groups_of_zeros_are_stored_in_every_format(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][:, 5] = 1e5
        tensors["model.layers.0.mlp.down_proj.weight"][:, :64] = 0
        tensors["model.layers.1.self_attn.o_proj.weight"][:] = 0

    model = changed(bf16_model, tmp_path / "spoilt", spoil)
    manifest = quantize_model(make_recipe(model, "W4A16_ASYM"))
    errors = {layer["name"]: layer["relative_weight_error"] for layer in manifest["layers"]}
    assert errors["model.layers.1.self_attn.o_proj"] == 0
    assert all(0 <= error < 0.1 for error in errors.values())
    for form in FORMATS:
        assert verify_checkpoint(tmp_path / form, open_source(model)).failed() == []


def test_tensors_that_transformers_does_not_load_are_in_every_output(
    bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    extra = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    model = changed(bf16_model, tmp_path / "mtp", lambda t: t.update({"model.layers.2.mtp.proj.weight": extra}))
    quantize_model(make_recipe(model))
    for form in FORMATS:
        with safe_open(tmp_path / form / "model.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("model.layers.2.mtp.proj.weight"), extra)
        report = verify_checkpoint(tmp_path / form, open_source(model))
        assert report.failed() == []
        assert "transformers does not load model.layers.2.mtp.proj.weight" in report.notes


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_weights_too_small_for_scales_in_float16_are_stored_in_every_format(
    scheme: str, bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj"

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight"][3] *= 1e-5
        tensors[f"{name}.weight"][4] *= 1e-12

    model = changed(bf16_model, tmp_path / "small", shrink)
    layers = quantize_model(make_recipe(model, scheme))["layers"]
    said = {layer["name"]: layer["fallbacks"] for layer in layers if layer["fallbacks"]}
    assert set(said) == {f"model.layers.0.self_attn.{part}_proj" for part in "qkv"}  # solved as one stack
    assert "groups, whose scales are too small for float16" in said[name][0]
    for form in FORMATS:
        assert verify_checkpoint(tmp_path / form, open_source(model), load_model=False).failed() == []
    checkpoint = open_source(tmp_path / "gptq")
    assert checkpoint.quantization is not None
    config = read_quantization_config(checkpoint.quantization)
    weights = {layer.name: layer.weight for layer in stored_layers(checkpoint, config, checkpoint.skeleton())}
    stored = weights[name].dequantize()[3]
    original = load_file(model / "model.safetensors")[f"{name}.weight"][3].float()
    step = weights[name].scale[3].float().abs().repeat_interleave(len(stored) // weights[name].scale.shape[1])
    assert ((stored - original).abs() <= 0.51 * step).all()


def test_a_scale_that_overflows_float16_names_the_layer(
    make_tiny_model: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    plain = make_tiny_model("llama", tmp_path / "float32")
    large = changed(plain, tmp_path / "large", lambda t: t["model.layers.0.self_attn.q_proj.weight"].mul_(1e7))
    with pytest.raises(QuantizationError, match=r"layers\.0\.self_attn\.q_proj: a scale overflows float16.*compressed"):
        quantize_model(make_recipe(large))


@pytest.mark.parametrize("form", FORMATS)
def test_a_model_that_is_quantized_already_is_refused(
    form: str, bf16_model: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(bf16_model, formats=(form,)))
    with pytest.raises(SourceError, match=rf"{form} is quantized already \({form}\). Give the original model"):
        quantize_model(make_recipe(tmp_path / form, formats=("gptq",)))


def test_a_tied_head_is_not_quantized(
    make_tiny_model: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path / "tied", dtype=torch.bfloat16, tie_word_embeddings=True)
    with pytest.raises(RecipeError, match="lm_head, which is outside the decoder blocks, is not supported yet"):
        quantize_model(make_recipe(model, extra="  ignore: []\n"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_named(
    make_tiny_model: Callable[..., Path], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path / "small", dtype=torch.bfloat16, vocab_size=128)
    with pytest.raises(CalibrationError, match=r"gives id \d+ and the model's vocabulary ends at 127"):
        quantize_model(make_recipe(model, "W8A8_STATIC", FORMATS[:1]))
    quantize_model(make_recipe(model))  # without calibration the tokenizer is not asked
