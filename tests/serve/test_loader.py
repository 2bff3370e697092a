"""From a checkpoint to a model: packed layers stay packed and compute the right thing, the rest is refused by name."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.errors import CheckpointError, EngineError
from quantkit.formats import compressed_tensors
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import QuantScheme
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve.models import probe as probe_module
from quantkit.serve.models.loader import load_model, resolve_dtype
from quantkit.serve.models.packed_linear import DispatchedLinear
from quantkit.serve.models.probe import probe_model
from quantkit.source import open_source
from quantkit_kernels.cpu_capability import has_bfloat16_matmul
from quantkit_kernels.native_library import native_blocker

HAS_NATIVE = native_blocker() is None and not has_bfloat16_matmul()
BODY_4_BITS = "cpu native int4" if HAS_NATIVE else "cpu int4pack"

W4_G32 = QuantScheme(num_bits=4, group_size=32)
SMALL = EngineConfig(max_model_len=64, max_num_seqs=4, kv_block_size=16)
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def quantize_folder(
    source: Path,
    packed: Path,
    dense: Path,
    scheme: QuantScheme = W4_G32,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write two checkpoints of the same weights: packed, and dequantized as every reader of the packed one must see."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    stored: dict[str, Tensor] = {}
    read: dict[str, Tensor] = {}
    schemes = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = read[name] = weight
            continue
        layer = name.removesuffix(".weight")
        scale = choose_qparams(weight.float(), scheme, dtype)[0]
        scale[::3] *= -1  # legal, and GPTQ's scale search makes them
        quantized = QuantizedWeight(quantize(weight, scale, scheme), scale, scheme)
        stored |= compressed_tensors.encode(layer, quantized)
        read[name] = quantized.dequantize(dtype)
        schemes[layer] = scheme
    for folder, weights in ((packed, stored), (dense, read)):
        folder.mkdir()
        for file in source.iterdir():
            if file.name not in ("model.safetensors", "config.json"):
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        if folder == packed:
            config["quantization_config"] = compressed_tensors.quantization_config(schemes, ["lm_head"])
        (folder / "config.json").write_text(json.dumps(config))


def spoiled(folder: Path, tmp_path: Path, change: Change) -> Path:
    """A copy of a checkpoint with other tensors or another config."""
    copy = tmp_path / "spoiled"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def use_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines load transformers' definition."""
    monkeypatch.setattr("quantkit.serve.engine.load_model", partial(load_model, definition="transformers"))


@pytest.fixture(scope="module")
def packed_and_dense(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("packed")
    quantize_folder(tiny_llama_folder, root / "packed", root / "dense")
    return root / "packed", root / "dense"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3"])
def test_packed_float32_greedy_tokens_are_those_of_the_dequantized_model(
    family: str, own: bool, tiny_models: Any, tmp_path: Path, random_prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qwen2 has biases, phi3 fused projections. transformers runs the dequantized weights."""
    from transformers import AutoModelForCausalLM

    quantize_folder(tiny_models(family), tmp_path / "packed", tmp_path / "dense")
    definition = f"quantkit ({'gemma3_text' if family == 'gemma3' else family})" if own else "transformers (as asked)"
    if not own:
        use_transformers(monkeypatch)
    engine = Engine(tmp_path / "packed", SMALL)
    assert engine.describe()["engine"]["kernels"][0] == f"definition: {definition}"
    num_layers = 8 if family == "phi3" or definition.startswith("quantkit") else 14
    wanted = f"w4a16_gemm: {BODY_4_BITS} in {num_layers} layers"
    assert any(wanted in k for k in engine.describe()["engine"]["kernels"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    prompts = [random_prompt(length, length) for length in (3, 17, 30)]
    completions = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for prompt, completion in zip(prompts, completions, strict=True):
        inputs = torch.tensor([prompt])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert completion.token_ids == tuple(output[0, len(prompt) :].tolist())
        with torch.no_grad():
            wanted = model(inputs).logits[0].log_softmax(-1)
        torch.testing.assert_close(engine.score(prompt), wanted, rtol=1e-4, atol=1e-3)


def test_packed_bfloat16_is_close_to_the_dequantized_model(
    tiny_llama_folder: Path, tmp_path: Path, random_prompt: Any
) -> None:
    quantize_folder(tiny_llama_folder, tmp_path / "packed", tmp_path / "dense", dtype=torch.bfloat16)
    packed, dense = Engine(tmp_path / "packed", SMALL), Engine(tmp_path / "dense", SMALL)
    assert packed.describe()["model"]["scheme"] == "W4A16 g32 symmetric"
    assert dense.describe()["model"]["scheme"] == "bfloat16"
    exact = Engine(tmp_path / "dense", EngineConfig(dtype="float32", max_model_len=64, max_num_seqs=4))
    token_ids = random_prompt(60, 3)
    wanted = exact.score(token_ids)
    divergence = [(wanted.exp() * (wanted - engine.score(token_ids))).sum(-1).mean() for engine in (packed, dense)]
    # Both round activations to bfloat16; the packed one must not be much farther from the exact one than that costs.
    assert divergence[0] < 2 * divergence[1] + 0.01


@pytest.mark.parametrize("own", [True, False])
def test_what_stays_in_memory_is_packed(
    own: bool, packed_and_dense: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        use_transformers(monkeypatch)
    packed, dense = (Engine(folder, SMALL) for folder in packed_and_dense)
    stored = load_file(packed_and_dense[0] / "model.safetensors")
    weights = sum(8 * tensor.numel() for name, tensor in stored.items() if name.endswith(".weight_packed"))
    # 4 bits a weight; a float32 scale and its zero point for each group of 32, without a compiler the scale once more
    packed_bytes = weights // 2 + weights // 32 * (2 if HAS_NATIVE else 3) * 4
    assert not any(parameter.is_meta for parameter in packed._loaded.model.parameters())
    saved = dense.describe()["model"]["weight_bytes"] - packed.describe()["model"]["weight_bytes"]
    assert saved == weights * 4 - packed_bytes
    wanted = f"w4a16_gemm: {BODY_4_BITS} in {8 if own else 14} layers"
    assert any(wanted in line for line in packed.describe()["engine"]["kernels"])


def test_layers_that_the_fast_kernel_does_not_take_say_so(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """One scale per row is not a group size of the kernel; it runs all the same, and says how."""
    scheme = QuantScheme(num_bits=4, group_size=-1)
    quantize_folder(tiny_llama_folder, tmp_path / "packed", tmp_path / "dense", scheme)
    packed, dense = (Engine(tmp_path / name, SMALL) for name in ("packed", "dense"))
    wanted = "w4a16_gemm: reference in 8 layers (group_size=-1 is not one of 32, 64, 128, 256)"
    if HAS_NATIVE:  # it takes any group
        wanted = f"w4a16_gemm: {BODY_4_BITS} in 8 layers (torch.float32 on a CPU with "
    assert any(line.startswith(wanted) for line in packed.describe()["engine"]["kernels"])
    torch.testing.assert_close(packed.score(range(5, 40)), dense.score(range(5, 40)), rtol=1e-4, atol=1e-3)


def set_quantization(**changes: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] |= changes

    return change


def set_weights(**changes: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes

    return change


def set_tensor(suffix: str, function: Callable[[Tensor], Tensor | None]) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        name = f"model.layers.1.mlp.up_proj.{suffix}"
        value = function(tensors.pop(name))
        if value is not None:
            tensors[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_quantization(quant_method="hqq"), r"the engine cannot run spoiled: quant_method is hqq"),
        (set_quantization(quant_method="bitsandbytes"), r"cannot run spoiled: quant_method is bitsandbytes"),
        (set_quantization(format="float-quantized"), r"cannot run spoiled: .*format=float-quantized is not supported"),
        (set_weights(num_bits=3), r"cannot run spoiled: W3A16 g32 symmetric has 3 bits, not 4 or 8"),
        (set_weights(symmetric=False), r"has no weight_zero_point for W4A16 g32 asymmetric"),
        (set_weights(group_size=48), r"model.layers.\d.\S+: in_features=\d+ is not a multiple of group_size=48"),
        (set_weights(group_size=64), r"weight_scale is torch.float32 \[\d+, \d\], needed is .* g64 symmetric of"),
        (set_quantization(ignore=["lm_head", r"re:.*up_proj"]), r"up_proj has codes, and the quantization_config does"),
        (set_tensor("weight_scale", lambda tensor: None), r"model.layers.1.mlp.up_proj has no weight_scale"),
        (
            set_tensor("weight_packed", lambda tensor: tensor[:-8]),
            r"up_proj.weight_packed is torch.int32 \[120, 8\]",
        ),
        (set_tensor("weight_packed", lambda tensor: tensor.long()), r"up_proj.weight_packed is torch.int64"),
    ],
)
def test_checkpoints_that_the_engine_cannot_run_are_refused(
    change: Change, message: str, packed_and_dense: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Engine(spoiled(packed_and_dense[0], tmp_path, change), SMALL)


def test_nan_weights_of_a_model_too_large_to_look_through_fail_the_request_and_not_the_engine(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    monkeypatch.setattr("quantkit.checkpoint.stored_weights.MAX_BYTES", 0)
    engine = Engine(spoiled(tiny_llama_folder, tmp_path, change), SMALL)
    with pytest.raises(
        EngineError, match=r"not finite .*: model.layers.0.mlp.up_proj.weight holds 1 such values. Down"
    ):
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0))


@pytest.mark.parametrize(
    ("asked", "stored", "wanted"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.bfloat16),
        ("float32", torch.bfloat16, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
    ],
)
def test_dtype(asked: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    assert resolve_dtype(asked, stored) == wanted


@pytest.mark.parametrize("is_fast", [True, False])
def test_dense_bfloat16_layers_go_through_the_kernel_where_torch_is_slow(
    is_fast: bool, make_tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit_kernels import dispatch

    monkeypatch.setattr(dispatch, "has_bfloat16_matmul", lambda: is_fast)
    dispatch.choose_linear.cache_clear()
    use_transformers(monkeypatch)
    try:
        folder = make_tiny_model("llama", tmp_path / "model", dtype=torch.bfloat16)
        engine = Engine(folder, SMALL)
        kinds = {type(engine._loaded.model.lm_head), type(engine._loaded.model.model.layers[0].mlp.up_proj)}
        assert kinds == {torch.nn.Linear if is_fast else DispatchedLinear}
        assert engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids
    finally:
        dispatch.choose_linear.cache_clear()


def test_longer_sequences_than_the_rotary_frequencies_are_fixed_for_are_not_offered(
    make_tiny_model: Any, tmp_path: Path
) -> None:
    """Beyond the original length the frequencies depend on the longest sequence of a batch."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    folder = make_tiny_model("llama", tmp_path / "model", rope_parameters=rope)
    assert Engine(folder, EngineConfig(max_num_seqs=1)).max_model_len == 128


def tiny_config(model_type: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return CONFIG_MAPPING[model_type](**settings, **changes)


def build(model_type: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from quantkit.serve.attention import ATTENTION_NAME, register_attention

    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2}, "gpt_oss, layer 0: attention needs s_aux"),
        ("llama4_text", {"head_dim": 8, "num_local_experts": 1, "attention_chunk_size": 8, "intermediate_size_mlp": 32},
         "llama4_text, layer 0: the attention mask is not causal"),
        ("falcon_h1", {"head_dim": 8}, "falcon_h1: it keeps a state that is no cache of keys"),
        ("bloom", {}, "bloom: layer 0 does not use attention"),
    ],
)  # fmt: skip
def test_models_that_the_engine_would_run_wrongly_are_refused_at_load(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=f"the engine cannot run {message}"):
        probe_model(build(model_type, **changes), torch.float32)


def test_a_model_that_mixes_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at its neighbours in the row, as a convolution does."""
    model = build("llama", head_dim=8)
    layer = model.model.layers[0].mlp
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: forward(x + x.roll(1, dims=1)))
    with pytest.raises(EngineError, match="its logits change when a sequence is computed in steps, beside another one"):
        probe_model(model, torch.float32)


@pytest.mark.parametrize(
    ("has_coded_inputs", "share", "is_run"), [(True, 0.3, True), (True, 1.0, False), (False, 0.3, False)]
)
def test_rounding_that_8_bit_inputs_amplify_is_no_leak(
    has_coded_inputs: bool, share: float, is_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe_module._in_two_steps

    def shifted(*arguments: Any) -> Tensor:
        logits = real(*arguments)
        return logits + share * (logits - logits.mean()).abs().mean()

    monkeypatch.setattr(probe_module, "_in_two_steps", shifted)
    model = build("llama", head_dim=8).to(torch.bfloat16)
    with nullcontext() if is_run else pytest.raises(EngineError, match="its logits change"):
        probe_model(model, torch.bfloat16, has_coded_inputs=has_coded_inputs)


def test_whatever_a_model_raises_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", head_dim=8)

    def broken(x: Tensor) -> Tensor:
        raise KeyError("past")

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", broken)
    with pytest.raises(EngineError, match="the engine cannot run llama: KeyError: 'past'"):
        probe_model(model, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
        ("cohere2", {"head_dim": 8, "sliding_window": 8}),
        ("olmo2", {}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("granite", {}),
    ],
)
def test_other_families_run(model_type: str, changes: dict[str, Any]) -> None:
    """Softcaps, windows of some layers only, norms elsewhere, experts, multipliers."""
    shapes = probe_model(build(model_type, **changes), torch.float32)
    assert [(shape.num_kv_heads, shape.head_dim, shape.value_dim) for shape in shapes] == [(2, 8, 8)] * 2


@pytest.mark.skipif(native_blocker() is not None, reason=str(native_blocker()))
@pytest.mark.parametrize(
    ("definition", "head_dim"), [("quantkit", 8), ("transformers", 8), ("quantkit", 12), ("quantkit", 264)]
)
def test_the_record_names_attention_over_blocks_only_where_it_runs(
    definition: Any, head_dim: int, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", head_dim=head_dim)
    kernels = load_model(open_source(folder), torch.float32, definition=definition).kernels
    assert any(line.startswith("paged_attention: cpu native") for line in kernels) is (head_dim == 8)
