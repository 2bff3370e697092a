"""GPTQ v1, v2 and AWQ GEMM: against words packed by hand and an unpacking of the formats' papers, written here."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError
from quantkit.formats import Format, awq, gptq, read_quantization_config
from quantkit.formats.safetensors_file import TensorSpec
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import PRESETS, QuantScheme
from quantkit.verify.independent_decoder import decode_steps

SYMMETRIC, ASYMMETRIC = QuantScheme(4, 32), QuantScheme(4, 32, symmetric=False)


def quantized(scheme=SYMMETRIC, rows=16, columns=64, dtype=torch.bfloat16, seed=0, shift=0.0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift
    scale, zero_point = choose_qparams(weight, scheme, dtype)
    return QuantizedWeight(quantize(weight, scale, scheme, zero_point), scale, scheme, zero_point)


def word(value):
    """A 32-bit word as the signed number that torch stores."""
    return value - (1 << 32) if value >= 1 << 31 else value


def unpack_gptq(tensors, name, bits, v1):
    """The weights as AutoGPTQ's linear layer makes them: shift and mask, zeros + 1 in v1, groups by g_idx."""
    shifts = torch.arange(0, 32, bits)
    mask = (1 << bits) - 1
    qweight, qzeros = tensors[f"{name}.qweight"].long(), tensors[f"{name}.qzeros"].long()
    codes = torch.stack([(qweight >> shift) & mask for shift in shifts], dim=1).reshape(-1, qweight.shape[1])
    zeros = torch.stack([(qzeros >> shift) & mask for shift in shifts], dim=2).reshape(qzeros.shape[0], -1)
    if v1:
        zeros = zeros + 1
    groups = tensors[f"{name}.g_idx"].long()
    return ((codes - zeros[groups]) * tensors[f"{name}.scales"].float()[groups]).t()


def unpack_awq(tensors, name, group_size):
    """The weights as AutoAWQ makes them: nibbles, put back by the reverse order [0, 4, 1, 5, 2, 6, 3, 7]."""

    def columns(words):
        nibbles = torch.stack([(words.long() >> shift) & 15 for shift in range(0, 32, 4)], dim=2)
        return nibbles[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(words.shape[0], -1)

    codes, zeros = columns(tensors[f"{name}.qweight"]), columns(tensors[f"{name}.qzeros"])
    groups = torch.arange(codes.shape[0]) // group_size
    return ((codes - zeros[groups]) * tensors[f"{name}.scales"].float()[groups]).t()


def test_gptq_words_by_hand():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 2)  # 8 rows of 32 columns: u = column % 16
    weight = QuantizedWeight(codes, torch.full((8, 1), 0.5, dtype=torch.bfloat16), SYMMETRIC)
    tensors = gptq.encode("l", weight)
    assert tensors["l.qweight"][:, 0].tolist() == [0x76543210, word(0xFEDCBA98)] * 2
    assert tensors["l.qzeros"].tolist() == [[0x77777777]]  # the middle, 8, less one
    assert gptq.encode("l", weight, checkpoint_format="gptq_v2")["l.qzeros"].tolist() == [[word(0x88888888)]]
    assert tensors["l.scales"].dtype == torch.float16
    assert tensors["l.g_idx"].tolist() == [0] * 32


def test_awq_words_by_hand():
    codes = torch.arange(-8, 0, dtype=torch.int8).unsqueeze(1).repeat(1, 32)  # u = row
    tensors = awq.encode("l", QuantizedWeight(codes, torch.full((8, 1), 0.5), SYMMETRIC))
    assert tensors["l.qweight"][0].tolist() == [0x75316420]  # rows 0 2 4 6 1 3 5 7, the lowest nibble first
    assert tensors["l.qzeros"].tolist() == [[word(0x88888888)]]


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([32, -1]),
    shift=st.sampled_from([0.0, 5.0, -5.0]),
    seed=st.integers(0, 2**16),
)
def test_an_independent_reader_sees_the_weights_bit_for_bit(form, bits, symmetric, group_size, shift, seed):
    """Also for groups that are all positive, whose zero point is 0 and has no place in v1, and all negative."""
    scheme = QuantScheme(4 if form == "awq" else bits, 32 if form == "awq" else group_size, symmetric)
    weight = quantized(scheme, seed=seed, shift=shift)
    options = {"checkpoint_format": form} if form.startswith("gptq") else {}
    writer = awq if form == "awq" else gptq
    tensors = writer.encode("l", weight, **options)
    specs = writer.layer_specs("l", (16, 64), scheme, torch.bfloat16, **options)
    assert {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()} == specs
    is_awq, v1 = form == "awq", form == "gptq"
    read = unpack_awq(tensors, "l", 32) if is_awq else unpack_gptq(tensors, "l", scheme.num_bits, v1)
    assert torch.equal(read, weight.dequantize())
    back = writer.decode(tensors, "l", scheme, (16, 64), **options)
    assert torch.equal(back.dequantize(), weight.dequantize())
    config = json.loads(json.dumps(writer.quantization_config({"a.0.l": scheme}, ["lm_head"], **options)))
    steps, scale = decode_steps(tensors.__getitem__, "l", config, scheme.num_bits)
    assert torch.equal(steps.float() * scale, weight.dequantize())


def test_a_zero_point_of_zero_is_mirrored_in_v1_only():
    weight = quantized(ASYMMETRIC, shift=5.0)
    assert bool((weight.zero_point == -8).all())
    v1, v2 = (gptq.encode("l", weight, checkpoint_format=form) for form in ("gptq", "gptq_v2"))
    assert bool((v1["l.scales"] < 0).all())
    assert v1["l.qzeros"].unique().tolist() == [word(0xEEEEEEEE)]  # 15 less one
    assert bool((v2["l.scales"] > 0).all())
    assert v2["l.qzeros"].unique().tolist() == [0]


@pytest.mark.parametrize("writer", [gptq, awq])
@pytest.mark.parametrize(("value", "what"), [(1e5, "overflows"), (1e-9, "is lost"), (6.2e-8, "is lost")])
def test_scales_of_bfloat16_that_float16_lacks_are_refused(writer, value, what):
    weight = quantized()
    weight.scale[3, 1] = value
    with pytest.raises(
        CheckpointError, match=rf"l: \w+ stores scales in float16, where the scale .* {what}\. Write com"
    ):
        writer.encode("l", weight)


def test_an_outlier_column_that_float16_holds_is_stored():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 1e5
    scale, _ = choose_qparams(weight, SYMMETRIC, torch.bfloat16)
    stored = gptq.encode("l", QuantizedWeight(quantize(weight, scale, SYMMETRIC), scale, SYMMETRIC))
    assert unpack_gptq(stored, "l", 4, v1=True)[:, 7].sub(1e5).abs().max() < 1e4  # half a step


@pytest.mark.parametrize("writer", [gptq, awq])
def test_groups_of_zeros_are_zero(writer):
    weight = torch.zeros(16, 64)
    for scheme in (SYMMETRIC, ASYMMETRIC):
        scale, zero_point = choose_qparams(weight, scheme, torch.float16)
        tensors = writer.encode(
            "l", QuantizedWeight(quantize(weight, scale, scheme, zero_point), scale, scheme, zero_point)
        )
        assert not writer.decode(tensors, "l", scheme, (16, 64)).dequantize().any()


def test_what_a_format_cannot_hold_is_said_with_what_it_can():
    with pytest.raises(
        CheckpointError, match=r"gptq cannot hold W8A8 channel symmetric, inputs dynamic .*; it holds 4 and 8"
    ):
        gptq.encode("l", quantized(PRESETS["W8A8"]))
    with pytest.raises(CheckpointError, match=r"awq cannot hold W8A16 .*; it holds 4 bits in groups of 32, 64 or 128"):
        awq.encode("l", quantized(PRESETS["W8A16"]))
    with pytest.raises(ValueError, match="gptq stores 4-bit layers whose rows are a multiple of 8"):
        gptq.layer_specs("l", (12, 64), SYMMETRIC, torch.bfloat16)
    with pytest.raises(ValueError, match="awq stores layers whose rows are a multiple of 8"):
        awq.layer_specs("l", (12, 64), SYMMETRIC, torch.bfloat16)
    with pytest.raises(ValueError, match="awq holds one scheme, not 2"):
        awq.quantization_config({"a": SYMMETRIC, "b": ASYMMETRIC}, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("l.qzeros"), "l has no qzeros"),
        (lambda t: t.update({"l.qweight": t["l.qweight"][:-1]}), r"l\.qweight is .*\[7, 16\], needed is .*\[8, 16\]"),
        (lambda t: t.update({"l.scales": t["l.scales"].double()}), r"l\.scales is torch\.float64"),
        (
            lambda t: t["l.g_idx"].copy_(t["l.g_idx"].flip(0)),
            r"its columns are permuted \(g_idx\), which is not supported",
        ),
        (lambda t: t["l.qzeros"].fill_(-1), "a zero point does not fit into 4 bits"),
        (lambda t: t["l.qzeros"].fill_(word(0x88888888)), r"\+1 off the middle \(it may be stored as gptq_v2\)"),
    ],
)
def test_gptq_tensors_that_do_not_fit_are_refused(change, message):
    tensors = gptq.encode("l", quantized())
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        gptq.decode(tensors, "l", SYMMETRIC, (16, 64))


def test_gptq_config_says_what_differs_and_what_stays():
    schemes = {
        "model.layers.0.self_attn.q_proj": SYMMETRIC,
        "model.layers.0.mlp.gate_proj": PRESETS["W8A16"],
        "model.layers.10.mlp.gate_proj": SYMMETRIC,
    }
    ignore = ["lm_head", "model.layers.0.mlp.down_proj"]
    written = json.loads(json.dumps(gptq.quantization_config(schemes, ignore)))
    assert {key: written[key] for key in ("quant_method", "bits", "group_size", "sym", "desc_act", "lm_head")} == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    assert written["dynamic"] == {
        r"^model\.layers\.0\.mlp\.(?:gate_proj|gate_up_proj)$": {"bits": 8, "group_size": -1, "sym": True},
        r"-:^model\.layers\.0\.mlp\.down_proj$": {},
    }
    read = read_quantization_config(written)
    assert {name: read.scheme_of(name) for name in schemes} == schemes
    assert [read.scheme_of(name) for name in ignore] == [None, None]
    assert read.format == Format("gptq", (("checkpoint_format", "gptq"),))
    assert "dynamic" not in gptq.quantization_config({"a": SYMMETRIC}, ["lm_head"], checkpoint_format="gptq_v2")


def test_config_of_other_tools_is_read():
    theirs = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "static_groups": True,
        "sym": False,
    }
    assert read_quantization_config(theirs).scheme_of("model.layers.0.x") == QuantScheme(4, 128, symmetric=False)
    assert read_quantization_config(theirs | {"format": "gptq_v2"}).storage == "gptq_v2"
    theirs = {
        "quant_method": "awq",
        "w_bit": 4,
        "q_group_size": 64,
        "version": "GEMM",
        "modules_to_not_convert": ["x.1.y"],
    }
    read = read_quantization_config(theirs)
    assert read.scheme_of("model.layers.0.q") == QuantScheme(4, 64, symmetric=False)
    assert read.scheme_of("model.x.1.y.z") is None
    assert read.scheme_of("lm_head") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits=3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "checkpoint_format=marlin",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version=gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point=False"),
        ({"quant_method": "hqq"}, "quant_method is hqq, not one of compressed-tensors, gptq, awq"),
    ],
)
def test_what_cannot_be_read_is_named(config, message):
    with pytest.raises(CheckpointError, match=message):
        read_quantization_config(config)
