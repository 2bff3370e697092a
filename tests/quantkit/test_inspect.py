"""inspect: what it says is compared with numbers from safetensors and gguf, and by hand."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError, SourceError
from quantkit.inspect_checkpoint import inspect_checkpoint
from quantkit.inspect_text import inspection_text
from quantkit.scheme import QuantScheme


@pytest.fixture(scope="module")
def checkpoint(tiny_llama_folder, write_rtn_checkpoint, tmp_path_factory):
    overrides = {f"model.layers.1.mlp.{part}_proj": QuantScheme(8, -1) for part in ("gate", "up", "down")}
    return write_rtn_checkpoint(tiny_llama_folder, tmp_path_factory.mktemp("inspect") / "out", overrides=overrides)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_checkpoint(checkpoint):
    report = inspect_checkpoint(checkpoint)
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report, allow_nan=False))
    assert report["format"] == "compressed-tensors pack-quantized"
    assert report["quantization"] == {
        "method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    tensors = load_file(checkpoint / "model.safetensors")
    assert report["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    attention = 64 * 64 + 32 * 64 + 32 * 64 + 64 * 64
    mlp = 3 * 64 * 128
    assert {entry["scheme"]: (entry["count"], entry["weights"]) for entry in report["schemes"]} == {
        "W4A16 g32 symmetric": (11, 2 * attention + mlp),
        "W8A16 channel symmetric": (3, mlp),
        "F32": (7, 2 * 320 * 64 + 5 * 64),
    }
    assert report["quantized_layers"] == 14
    assert report["weights"] == 2 * (attention + mlp) + 2 * 320 * 64 + 5 * 64
    assert report["bits_per_weight"]["overall"] == pytest.approx(8 * report["bytes"] / report["weights"])
    four_bit = (2 * attention + mlp) * (4 + 32 / 32) + 11 * 128  # codes, float32 scales of groups of 32, shapes
    eight_bit = mlp * 8 + (128 + 128 + 64) * 32 + 3 * 128
    norms = 5 * 64 * 32
    body = (four_bit + eight_bit + norms) / (2 * (attention + mlp) + 5 * 64)
    assert report["bits_per_weight"]["body"] == pytest.approx(body)
    assert [item["name"] for item in report["largest"][:2]] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert report["largest"][0]["nbytes"] == 320 * 64 * 4
    assert report["files"] == [
        {"name": "model.safetensors", "bytes": (checkpoint / "model.safetensors").stat().st_size}
    ]
    assert "chat_template.jinja" in report["side_files"]


def test_provenance_and_worst_layers(checkpoint):
    report = inspect_checkpoint(checkpoint)
    assert report["provenance"]["model"]["name"].startswith("tiny_llama")
    errors = [layer["error"] for layer in report["worst_layers"]]
    assert len(errors) == 10
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(0.13)
    assert {layer["measure"] for layer in report["worst_layers"]} == {"relative_output_error"}


def test_text(checkpoint):
    text = inspection_text(inspect_checkpoint(checkpoint), width=100)
    assert "compressed-tensors pack-quantized" in text
    assert "W8A16 channel symmetric" in text
    assert "layers with the largest error" in text
    assert "0.1300" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_sharded_checkpoint_says_the_same(tiny_llama_folder, write_rtn_checkpoint, tmp_path):
    one = inspect_checkpoint(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "one"))
    many = inspect_checkpoint(write_rtn_checkpoint(tiny_llama_folder, tmp_path / "many", max_shard_bytes=50_000))
    assert len(many["files"]) == 3
    for key in ("weights", "bytes", "bits_per_weight", "schemes", "quantized_layers"):
        assert many[key] == one[key]


def test_ordinary_folder(tiny_llama_folder):
    report = inspect_checkpoint(tiny_llama_folder)
    assert report["format"] == "safetensors"
    (entry,) = report["schemes"]
    assert (entry["scheme"], entry["count"], entry["bytes"]) == ("F32", 21, report["bytes"])
    assert entry["weights"] == sum(t.numel() for t in load_file(tiny_llama_folder / "model.safetensors").values())
    assert report["bits_per_weight"] == {"body": 32.0, "overall": 32.0}
    assert report["provenance"] is None
    assert report["worst_layers"] == []
    assert "quantized layers   0" in inspection_text(report)


def test_gguf_by_its_header(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float16))
    packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.ffn_down.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = inspect_checkpoint(path)
    assert report["format"] == "gguf version 3"
    assert report["model_type"] == "llama"
    assert {entry["scheme"]: entry["count"] for entry in report["schemes"]} == {"F16": 1, "Q4_0": 1}
    assert report["bits_per_weight"]["body"] == pytest.approx(4.5)  # 18 bytes for 32 weights
    assert report["largest"][1]["shape"] == (64, 128)
    assert report["quantized_layers"] == 1
    assert report["notes"] == ["it has no chat template"]
    assert report["provenance"] == {"name": "tiny"}
    assert "note: it has no chat template" in inspection_text(report)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SourceError, match=r"model\.gguf is no whole GGUF file: it is truncated"):
        inspect_checkpoint(path)
    with pytest.raises(SourceError, match=r"cannot read .*No such file"):
        inspect_checkpoint(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("config", "shape", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}, (128 // 8, 64),
         "W4A16 g32 symmetric"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, (128, 64 // 8),
         "W4A16 g32 asymmetric"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, (128 * 3 // 32, 64), "gptq 3 bits g32"),
    ],
    ids=["gptq", "awq", "3 bits"],
)  # fmt: skip
def test_checkpoint_of_another_tool(tiny_llama_folder, tmp_path, config, shape, scheme):
    folder = Path(shutil.copytree(tiny_llama_folder, tmp_path / "peer"))
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    del tensors[f"{layer}.weight"]
    tensors |= {
        f"{layer}.qweight": torch.zeros(shape, dtype=torch.int32),
        f"{layer}.qzeros": torch.zeros(4, 8, dtype=torch.int32),
        f"{layer}.scales": torch.ones(4, 64, dtype=torch.float16),
        f"{layer}.g_idx": torch.zeros(128, dtype=torch.int32),
    }
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=config)
    report = inspect_checkpoint(folder)
    method = config["quant_method"]
    assert report["format"] == " ".join([method, *config.get("version", "").split()])
    assert report["quantization"].items() >= {"method": method, "bits": config["bits"], "group_size": 32}.items()
    (entry,) = [entry for entry in report["schemes"] if entry["scheme"] == scheme]
    assert entry["weights"] == 64 * 128
    assert entry["bytes"] == shape[0] * shape[1] * 4 + 4 * 8 * 4 + 4 * 64 * 2 + 128 * 4
    three = ["quantization_config: bits=3 is not supported yet: sizes only"]
    assert report["notes"] == (three if config["bits"] == 3 else [])


def test_scheme_that_is_not_supported_yet(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "float-quantized"
    (folder / "config.json").write_text(json.dumps(config))
    report = inspect_checkpoint(folder)
    assert report["format"] == "compressed-tensors float-quantized"
    assert report["notes"] == ["quantization_config: format=float-quantized is not supported yet: sizes only"]
    assert report["quantized_layers"] == 14


BROKEN_RECORDS = {
    "{": "Invalid JSON",
    "[]": "Input should be an object",
    '{"schema_version": 99, "layers": []}': "schema_version: Input should be 1",
    '{"schema_version": 1, "layers": 5, "files": [], "probe": 3}': "layers: Input should be a valid array",
    '{"schema_version": 1, "layers": [{"name": "a", "relative_output_error": "x"}]}': "layers.0.relative_output_error",
    '{"schema_version": 1, "model": "x"}': "model: Input should be an object",
}


def test_broken_record(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    for text, problem in BROKEN_RECORDS.items():
        (folder / "quantkit.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"quantkit\.json is broken or of another version: {problem}"):
            inspect_checkpoint(folder)


def test_real_gguf(smollm2_gguf):
    report = inspect_checkpoint(smollm2_gguf)
    assert report["weights"] == 134_515_008
    assert {entry["scheme"]: entry["count"] for entry in report["schemes"]} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert report["bits_per_weight"]["body"] == pytest.approx(5.0, abs=0.02)
    assert report["notes"] == []
