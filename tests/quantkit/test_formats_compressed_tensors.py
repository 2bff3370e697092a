"""compressed-tensors pack-quantized; the package itself and transformers are the independent readers."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantkit.errors import CheckpointError
from quantkit.formats.compressed_tensors import (
    decode,
    encode,
    layer_specs,
    quantization_config,
    read_quantization_config,
)
from quantkit.formats.packing import pack_int32, unpack_int32
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.source import open_source

W8A8, STATIC = PRESETS["W8A8"], PRESETS["W8A8_STATIC"]


def quantized(rows=16, columns=128, scheme=None, dtype=torch.bfloat16, seed=0):
    scheme = scheme or QuantScheme(num_bits=4, group_size=32)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    scale, zero_point = choose_qparams(weight, scheme, dtype)
    return QuantizedWeight(quantize(weight, scale, scheme, zero_point), scale, scheme, zero_point)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_packing_is_that_of_the_package(num_bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (num_bits - 1)), 1 << (num_bits - 1)
    codes = torch.randint(low, high, (rows, columns), generator=generator).to(torch.int8)
    words = pack_int32(codes, num_bits)
    assert words.dtype == torch.int32
    assert torch.equal(words, pack_to_int32(codes, num_bits))
    assert torch.equal(unpack_int32(words, num_bits, columns), codes)
    assert torch.equal(unpack_from_int32(words, num_bits, codes.shape).to(torch.int8), codes)


def test_packing_by_hand():
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1, 7]], dtype=torch.int8)
    # nibbles 0 1 8 f 9 a b 7, lowest first: 0x7ba9f810, then f alone
    assert pack_int32(codes, 4).tolist() == [[0x7BA9F810, 0x0000000F]]
    assert pack_int32(torch.full((1, 8), 7, dtype=torch.int8), 4).tolist() == [[-1]]  # all bits set


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme(4, 32),
        QuantScheme(4, -1),
        QuantScheme(8, 128),
        QuantScheme(4, 32, symmetric=False),
        QuantScheme(8, -1, symmetric=False),
        W8A8,
        STATIC,
    ],
    ids=str,
)
def test_encode_and_decode(scheme):
    weight = quantized(scheme=scheme)
    tensors = encode("a.b", weight, torch.tensor([0.25], dtype=torch.bfloat16) if scheme == STATIC else None)
    specs = layer_specs("a.b", (16, 128), scheme, torch.bfloat16)
    assert {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()} == specs
    back = decode(tensors, "a.b", scheme)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale, weight.scale)
    assert back.scheme == scheme
    assert (back.zero_point is None) == scheme.symmetric
    assert back.zero_point is None or torch.equal(back.zero_point, weight.zero_point)


@pytest.mark.parametrize("rows", [16, 20, 31])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_tensors_are_those_that_the_package_compresses(num_bits, rows):
    """Its own compressor, on the weights that our codes stand for; odd numbers of rows fill the last word in part."""
    scheme = QuantScheme(num_bits, 32, symmetric=False)
    weight = quantized(rows=rows, scheme=scheme, dtype=torch.float32)
    theirs = PackedQuantizationCompressor.compress(
        {"weight": weight.dequantize(), "weight_scale": weight.scale, "weight_zero_point": weight.zero_point},
        QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(num_bits=num_bits, symmetric=False, strategy="group", group_size=32),
        ),
    )
    ours = {name.removeprefix("l."): tensor for name, tensor in encode("l", weight).items()}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_encode_refuses():
    weight = quantized()
    with pytest.raises(CheckpointError, match="codes from -9 to 7 do not fit into 4 bits"):
        encode("l", QuantizedWeight(torch.tensor([[-9, 7]], dtype=torch.int8), weight.scale, weight.scheme))
    with pytest.raises(CheckpointError, match="a scale is not finite"):
        encode("l", QuantizedWeight(weight.codes, weight.scale * float("inf"), weight.scheme))
    with pytest.raises(CheckpointError, match="a scale is zero"):
        encode("l", QuantizedWeight(weight.codes, weight.scale * 0, weight.scheme))
    with pytest.raises(CheckpointError, match=r"l: compressed-tensors cannot hold W3A16 .*; it holds 4 and 8 bits"):
        encode("l", quantized(scheme=QuantScheme(3, 32)))
    with pytest.raises(CheckpointError, match="inputs static per tensor needs an input scale"):
        encode("l", quantized(scheme=STATIC))
    with pytest.raises(CheckpointError, match=r"the input scale \[0\.0\] is not positive"):
        encode("l", quantized(scheme=STATIC), torch.zeros(1))
    with pytest.raises(CheckpointError, match="W4A16 g32 symmetric needs no input scale"):
        encode("l", weight, torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("l.weight_scale"), "l has no weight_scale"),
        (
            lambda t: t.update({"l.weight_packed": t["l.weight_packed"][:, :-1]}),
            r"l\.weight_packed is .*\[16, 15\], needed is .*\[16, 16\] for W4A16 g32 symmetric of \[16, 128\]",
        ),
        (lambda t: t.update({"l.weight_packed": t["l.weight_packed"].long()}), r"l\.weight_packed is torch\.int64"),
        (lambda t: t.update({"l.weight_scale": t["l.weight_scale"][:, :2]}), r"l\.weight_scale is .*\[16, 2\]"),
        (lambda t: t.update({"l.weight_shape": torch.tensor([16, 130])}), r"130 is not a multiple of group_size=32"),
        (lambda t: t.update({"l.weight_shape": torch.tensor([16])}), r"l\.weight_shape does not give 2 sizes"),
    ],
)
def test_decode_refuses_what_does_not_fit(change, message):
    tensors = encode("l", quantized())
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        decode(tensors, "l", QuantScheme(4, 32))


# --- config.json ----------------------------------------------------------------------------------------------------


def test_config_of_one_scheme_to_the_letter():
    config = quantization_config({"model.layers.0.mlp.up_proj": QuantScheme(4, 64)}, ["lm_head"])
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "dynamic": False,
                    "group_size": 64,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }


def test_the_documented_config_is_the_written_one():
    text = (Path(__file__).parents[2] / "docs" / "FORMATS.md").read_text(encoding="utf-8")
    documented = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert documented == quantization_config({"model.layers.0.mlp.up_proj": QuantScheme(4, 64)}, ["lm_head"])


def test_package_accepts_the_config_and_resolves_the_same_schemes():
    schemes = {"a.q_proj": QuantScheme(4, 32), "a.o_proj": QuantScheme(8, -1), "b.q_proj": QuantScheme(4, 32)}
    written = json.loads(json.dumps(quantization_config(schemes, ["lm_head"])))
    theirs = QuantizationConfig.model_validate(written)
    assert theirs.format == "pack-quantized"
    assert theirs.ignore == ["lm_head"]
    by_target = {target: group.weights for group in theirs.config_groups.values() for target in group.targets}
    ours = read_quantization_config(written)
    for name, scheme in schemes.items():
        assert ours.scheme_of(name) == scheme
        assert by_target[name].num_bits == scheme.num_bits
        assert by_target[name].strategy == scheme.strategy
        assert by_target[name].group_size == (None if scheme.group_size == -1 else scheme.group_size)
    assert ours.scheme_of("lm_head") is None
    assert ours.scheme_of("c.q_proj") is None  # named targets only


def test_config_of_mixed_storage_names_the_format_of_each_group():
    """Weights with and without 8-bit inputs: ``mixed-precision`` above, and the format inside each group."""
    schemes = {"a.o_proj": QuantScheme(4, 32, symmetric=False), "a.q_proj": STATIC, "b.q_proj": W8A8}
    written = json.loads(json.dumps(quantization_config(schemes, ["lm_head"])))
    assert written["format"] == "mixed-precision"
    theirs = QuantizationConfig.model_validate(written).config_groups
    assert [group.format for group in theirs.values()] == ["pack-quantized", "int-quantized", "int-quantized"]
    assert [group.weights.symmetric for group in theirs.values()] == [False, True, True]
    found = [group.input_activations for group in theirs.values()]
    assert found[0] is None
    assert [(inputs.dynamic, inputs.strategy, inputs.num_bits) for inputs in found[1:]] == [
        (False, "tensor", 8),
        (True, "token", 8),
    ]
    ours = read_quantization_config(written)
    assert {name: ours.scheme_of(name) for name in schemes} == schemes
    only = quantization_config({"a.q_proj": W8A8}, [])
    assert only["format"] == "int-quantized"
    assert "format" not in only["config_groups"]["group_0"]


def test_targets_resolve_by_name_then_expression_then_class():
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {
        "class": {"targets": ["Linear"], "weights": weights},
        "expression": {"targets": ["re:.*down_proj"], "weights": weights | {"num_bits": 8}},
        "name": {"targets": ["layers.3.down_proj"], "weights": weights | {"group_size": 64}},
    }
    config = read_quantization_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
            "ignore": ["re:lm_"],
        }
    )
    assert config.scheme_of("layers.0.q_proj") == QuantScheme(4, 32)
    assert config.scheme_of("layers.0.down_proj") == QuantScheme(8, 32)
    assert config.scheme_of("layers.3.down_proj") == QuantScheme(4, 64)
    assert config.scheme_of("lm_head") is None
    assert config.scheme_of("embed_tokens", "Embedding") is None


def test_config_that_llm_compressor_writes_is_read():
    config = read_quantization_config(
        {
            "config_groups": {
                "group_0": {
                    "format": "pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": "static",
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 128,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "scale_dtype": None,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                        "zp_dtype": None,
                    },
                }
            },
            "format": "pack-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.12.2",
        }
    )
    assert config.scheme_of("model.layers.0.self_attn.q_proj") == QuantScheme(4, 128)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quant_method",), "gptq", "quant_method is gptq"),
        (("format",), "int-quantized", "group_0 holds W4A16 g32 symmetric as int-quantized"),
        (("format",), "float-quantized", "format=float-quantized"),
        (("quantization_status",), "frozen", "quantization_status=frozen"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme="),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config="),
        (("config_groups",), {}, "config_groups="),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 4}, r"group_0\.input_activations\.num_bits=4"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "group_0 holds W4A8 .* as pack-quantized"),
        (("config_groups", "group_0", "output_activations"), {"num_bits": 8}, r"group_0\.output_activations"),
        (("config_groups", "group_0", "targets"), [], "has no targets"),
        (("config_groups", "group_0", "weights", "type"), "float", r"weights\.type=float"),
        (("config_groups", "group_0", "weights", "num_bits"), 16, r"weights\.num_bits=16"),
        (("config_groups", "group_0", "weights", "strategy"), "block", r"weights\.strategy=block"),
        (("config_groups", "group_0", "weights", "group_size"), None, r"weights\.group_size=None"),
        (("config_groups", "group_0", "weights", "actorder"), "group", r"weights\.actorder=group"),
        (("config_groups", "group_0", "weights", "surprise"), 1, r"weights\.surprise=1"),
    ],
)
def test_what_cannot_be_read_is_named(path, value, message):
    config = quantization_config({"l": QuantScheme(4, 32)}, [])
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        read_quantization_config(config)


def test_contradiction_is_our_own_bug():
    with pytest.raises(ValueError, match="lm_head is quantized and ignored"):
        quantization_config({"lm_head": QuantScheme(4, 32)}, ["lm_head"])
    with pytest.raises(ValueError, match="no layer is quantized"):
        quantization_config({}, [])


# --- transformers reads what we write -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_transformers_reads_our_checkpoint(tiny_models, write_rtn_checkpoint, tmp_path, family):
    out = write_rtn_checkpoint(tiny_models(family), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    ids = torch.arange(2, 34).unsqueeze(0)
    with torch.no_grad():
        logits = model(ids).logits[0]
    probe = json.loads((out / "quantkit.json").read_text())["probe"]
    assert torch.allclose(logits.topk(8).values, torch.tensor(probe["top_logits"]), atol=2e-4)
    source, tensors = open_source(out), load_file(out / "model.safetensors")
    config = read_quantization_config(source.quantization)
    packed = source.weight_map(source.skeleton()).packed
    assert len(packed) == sum(name.endswith("weight_packed") for name in tensors)
    for parameter, layer in packed.items():
        weight = decode(tensors, layer, config.scheme_of(parameter.removesuffix(".weight")))
        assert torch.equal(model.get_parameter(parameter), weight.dequantize(torch.float32)), parameter


def test_two_schemes_in_bf16(make_tiny_model, write_rtn_checkpoint, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    overrides = {f"model.layers.1.mlp.{part}_proj": QuantScheme(8, -1) for part in ("gate", "up", "down")}
    out = write_rtn_checkpoint(folder, tmp_path / "out", overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))  # compressed-tensors unpacks at the first use
    tensors = load_file(out / "model.safetensors")
    config = read_quantization_config(open_source(out).quantization)
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj"):
        weight = decode(tensors, name, config.scheme_of(name))
        assert torch.equal(model.get_submodule(name).weight, weight.dequantize(torch.bfloat16))
    assert tensors["model.layers.1.mlp.down_proj.weight_packed"].shape == (64, 32)
