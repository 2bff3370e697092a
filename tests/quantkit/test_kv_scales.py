"""Static scales of keys and values: what is found, how it is stored, who reads it, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from quantkit.architectures import find_decoder_blocks
from quantkit.calibration.activations import enter_blocks
from quantkit.calibration.key_value_range import KeyValueRange, attention_modules, observe_keys_and_values
from quantkit.errors import QuantizationError, RecipeError
from quantkit.pipeline import quantize_model
from quantkit.recipe import Recipe, parse_recipe
from quantkit.serve.config import EngineConfig
from quantkit.serve.engine import Engine
from quantkit.source import open_source
from quantkit.verify import verify_checkpoint
from quantkit.verify.independent_reader import ReaderModel

TEMPLATE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {corpus}}}]
  num_tokens: 256
  window_tokens: 64
  pack_documents: true
quantization: {{scheme: {scheme}, algorithm: {{name: {algorithm}}}, kv_cache: {{dtype: fp8}}}}
outputs: [{{format: compressed-tensors, path: {output}}}]
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. A model reads the prompt and answers. " * 20)
    return path


@pytest.fixture
def make_recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(model: Path, algorithm: str = "gptq", scheme: str = "{num_bits: 4, group_size: 32}") -> Recipe:
        return parse_recipe(
            TEMPLATE.format(model=model, corpus=corpus, algorithm=algorithm, scheme=scheme, output=tmp_path / "out")
        )

    return make


@pytest.mark.parametrize(
    ("family", "algorithm", "scheme"),
    [
        ("llama", "gptq", "{num_bits: 4, group_size: 32}"),
        ("gemma3", "rtn", "{num_bits: 4, group_size: 32, symmetric: false}"),
        ("qwen3", "rtn", "W8A8_STATIC"),
        ("phi3", "rtn", "{num_bits: 8}"),
    ],
)
def test_scales_are_those_of_the_quantized_model_s_cache_and_pass_every_check(
    family: str,
    algorithm: str,
    scheme: str,
    make_tiny_model: Callable[..., Path],
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(family, tmp_path / "model", dtype=torch.bfloat16)
    recipe = make_recipe(folder, algorithm, scheme)
    manifest = quantize_model(recipe)
    report = verify_checkpoint(tmp_path / "out", open_source(folder))
    assert report.failed() == []
    assert "kv_scales" in [check.name for check in report.checks]
    assert any("vLLM keeps keys and values in fp8" in note for note in report.notes)
    assert any("llama.cpp's converter does not take it: it does not know k_scale" in note for note in report.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    args = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert args is not None
    assert (args.num_bits, args.type, args.strategy, args.symmetric, args.dynamic) == (
        8,
        "float",
        "tensor",
        True,
        False,
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    model = ReaderModel(tmp_path / "out", torch.bfloat16, dequantize="symmetric: false" in scheme).model
    torch.nn.Module.float(model)
    text = Path(recipe.calibration.sources[0].path).read_text()  # type: ignore[union-attr, index]
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text).input_ids[:256]).reshape(4, 64)
    cache = DynamicCache()  # not the model's own, whose sliding layers forget
    with torch.inference_mode():
        model(ids, cache=cache)
    for number, layer in enumerate(cache.layers):
        for name, states in (("k_scale", layer.keys), ("v_scale", layer.values)):
            stored = tensors[f"model.layers.{number}.self_attn.{name}"]
            assert (stored.shape, stored.dtype) == ((1,), torch.bfloat16)
            expected, _ = calculate_qparams(states.min().reshape(1), states.max().reshape(1), args)
            assert float(stored) == pytest.approx(float(expected), rel=0.02)
            own = [r["kv_scales"][name] for r in manifest["layers"] if f"layers.{number}.self_attn." in r["name"]]
            assert set(own) == {float(stored)}


def test_scales_are_amax_over_448_and_must_be_usable() -> None:
    made = KeyValueRange(key=896.0, value=3.5).scales(torch.bfloat16)
    assert {name: float(scale) for name, scale in made.items()} == {"k_scale": 2.0, "v_scale": 0.0078125}
    fp8 = torch.tensor([896.0, -3.0]).div(made["k_scale"]).to(torch.float8_e4m3fn)
    assert fp8.float().tolist() == [448.0, -1.5]
    for found in (KeyValueRange(), KeyValueRange(1.0, float("inf")), KeyValueRange(1e-6, 1.0)):
        with pytest.raises(QuantizationError, match=r"_scale would be .* Leave quantization\.kv_cache out"):
            found.scales(torch.float16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "mixtral"])
def test_one_module_of_a_block_keeps_keys_and_values(family: str, tiny_models: Callable[[str], Path]) -> None:
    model = open_source(tiny_models(family)).skeleton()
    assert attention_modules(model.get_submodule("model.layers.0")) == ["self_attn"]


def test_keys_and_values_of_counted_tokens_alone_are_observed(tiny_models: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32).eval()
    decoder = find_decoder_blocks(model, "llama")
    token_ids = torch.randint(3, 320, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20).expand(4, 20) < torch.tensor([[4], [3], [1], [0]])
    batches = enter_blocks(model, decoder, list(zip(token_ids.split(2), mask.split(2), strict=True)))
    before = [batch.kwargs for batch in batches]
    with torch.inference_mode(), observe_keys_and_values(batches, 0) as found:
        for batch in batches:
            decoder.blocks[0](batch.hidden, **batch.kwargs[0])
    assert [batch.kwargs for batch in batches] == before
    cache = DynamicCache()
    with torch.inference_mode():
        model(token_ids, cache=cache)
    for largest, states in ((found.key, cache.layers[0].keys), (found.value, cache.layers[0].values)):
        counted = states.transpose(1, 2)[mask]
        assert largest == pytest.approx(float(counted.abs().max()), rel=1e-5)
        assert largest < float(states.abs().max())


def test_an_interrupted_run_resumes_to_the_same_scales(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    first = quantize_model(make_recipe(tiny_llama_folder))["files"]
    (tmp_path / "out").rename(tmp_path / "first")
    seen: list[int] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(make_recipe(tiny_llama_folder), resume=True, progress=interrupt)
    assert quantize_model(make_recipe(tiny_llama_folder), resume=True)["files"] == first


def test_the_engine_runs_such_a_checkpoint_and_says_that_the_scales_are_not_used(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(tiny_llama_folder, "rtn"))
    engine = Engine(str(tmp_path / "out"), EngineConfig(max_model_len=64, kv_cache_dtype="int8"))
    assert engine.describe()["engine"]["kernels"][-1].startswith("stored k_scale and v_scale (fp8) are not used")
    plain = Engine(str(tiny_llama_folder), EngineConfig(max_model_len=64))
    assert not any("k_scale" in line for line in plain.describe()["engine"]["kernels"])


def _broken(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any], folder: Path) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    report = verify_checkpoint(folder, load_model=False)
    return [check.detail for check in report.checks if check.name == "kv_scales" and not check.ok]


def test_verify_names_a_scale_that_is_missing_unusable_or_not_announced(
    tiny_llama_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize_model(make_recipe(tiny_llama_folder, "rtn"))
    name = "model.layers.1.self_attn.v_scale"
    assert _broken(lambda t, c: t.update({name: torch.zeros(1)}), tmp_path / "out") == [f"{name} is 0"]
    shaped = f"{name} is torch.float32 [2], not torch.float32 [1]"
    assert _broken(lambda t, c: t.update({name: torch.ones(2)}), tmp_path / "out") == [shaped]
    assert _broken(lambda t, c: t.pop(name), tmp_path / "out") == [f"{name} is missing, and vLLM would take 1"]
    unsaid = _broken(lambda t, c: c.pop("kv_cache_scheme"), tmp_path / "out")
    assert "is stored, but config.json has no kv_cache_scheme (and 2 more)" in unsaid[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fp8", "int8", r"int8 scales of keys and values cannot be stored.*8-bit floats only; write fp8"),
        ("fp8", "fp16", "fp8"),
        ("format: compressed-tensors", "format: gptq", "gptq holds no scales of keys and values"),
        ("kv_cache:", "tuning: {}, kv_cache:", "does not go with tuning"),
    ],
)
def test_what_no_reader_takes_is_refused(old: str, new: str, message: str, corpus: Path) -> None:
    text = TEMPLATE.format(model="m", corpus=corpus, algorithm="rtn", scheme="W4A16", output="out")
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text.replace(old, new))
    without = text[: text.index("calibration")] + text[text.index("quantization") :]
    with pytest.raises(RecipeError, match="calibration: missing; kv_cache needs it"):
        parse_recipe(without)
