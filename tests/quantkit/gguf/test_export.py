"""Whole files: transformers reads them back and must give the original's answers; the gguf package reads the rest."""

import hashlib
import json
import math
import os
import resource
import shutil
import signal

import gguf
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit.cli import main
from quantkit.errors import CheckpointError, QuantizationError, UsageError
from quantkit.export_gguf import export as export_module
from quantkit.export_gguf import export_gguf
from quantkit.export_gguf import tensors as tensors_module
from quantkit.export_gguf.request import ExportRequest, run_export
from quantkit.export_gguf.verify import verify_gguf
from quantkit.formats.gguf.header import read_gguf_header
from quantkit.source import open_source

IDS = torch.arange(5, 45).unsqueeze(0)
# What transformers' reader of GGUF takes from its defaults and not from the file has to be the default here.
SETTINGS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": None},
    "gemma3": {"layer_types": ["sliding_attention"] * 2, "head_dim": 256, "query_pre_attn_scalar": 256},
    "phi3": {},
}


def logits(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", SETTINGS)
def test_transformers_reads_the_same_model(family, make_tiny_model, tmp_path):
    folder = make_tiny_model(family, tmp_path / "model", **SETTINGS[family])
    record = export_gguf(open_source(folder), tmp_path / "out.gguf", "F32")
    assert record["types"].keys() == {"F32"}
    assert torch.equal(logits(tmp_path, gguf_file="out.gguf"), logits(folder))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["model", "out.gguf", "out.quantkit.json"]


OTHERS = {
    "gemma2": ("Gemma2Config", {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 24}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "norm_topk_prob": True},
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_transformers_reads_the_same_model_of_other_families(family, tiny_llama_folder, tmp_path):
    name, settings = OTHERS[family]
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, name)(**shape, **heads, **settings, max_position_embeddings=256, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_folder / file, folder)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "F32")
    assert torch.equal(logits(tmp_path, gguf_file="out.gguf"), logits(folder))


def decoded(path):
    return {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors}


def test_experts_are_stacked(tiny_models, tmp_path):
    source = open_source(tiny_models("mixtral"))
    record = export_gguf(source, tmp_path / "out.gguf", "F32", overrides=[(".*_exps.weight", "Q8_0")])
    assert record["types"] == {"F32": 17, "Q8_0": 6}
    tensors, original = decoded(tmp_path / "out.gguf"), load_file(source.folder / "model.safetensors")
    for number, (ours, theirs) in enumerate({"gate": "w1", "down": "w2", "up": "w3"}.items()):
        experts = [original[f"model.layers.1.block_sparse_moe.experts.{e}.{theirs}.weight"] for e in range(4)]
        expected = gguf.quants.dequantize(
            gguf.quants.quantize(torch.stack(experts).numpy(), gguf.GGMLQuantizationType.Q8_0),
            gguf.GGMLQuantizationType.Q8_0,
        )
        assert np.array_equal(tensors[f"blk.1.ffn_{ours}_exps.weight"], expected), number
    router = original["model.layers.1.block_sparse_moe.gate.weight"].numpy()
    assert np.array_equal(tensors["blk.1.ffn_gate_inp.weight"], router)
    metadata = read_gguf_header(tmp_path / "out.gguf").metadata
    assert (metadata["llama.expert_count"], metadata["llama.expert_used_count"]) == (4, 2)


def test_q4_k_m_file(make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    record = export_gguf(open_source(folder), tmp_path / "out.gguf", "Q4_K_M")
    header = read_gguf_header(tmp_path / "out.gguf")
    types = {tensor.name: tensor.type_name for tensor in header.tensors}
    assert record["tensors"] == types
    assert [types[f"blk.{i}.attn_v.weight"] for i in range(8)] == [
        *("Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K")
    ]
    assert (header.metadata["general.file_type"], header.metadata["general.quantization_version"]) == (15, 2)
    original = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    difference = torch.from_numpy(decoded(tmp_path / "out.gguf")["blk.1.ffn_up.weight"]) - original
    assert 0.01 < float(difference.norm() / original.norm()) < 0.08
    bits = sum(t.nbytes for t in header.tensors) * 8 / sum(t.num_elements for t in header.tensors)
    assert record["bits_per_weight"] == pytest.approx(bits)
    assert record["files"][0]["bytes"] == (tmp_path / "out.gguf").stat().st_size


def test_same_model_same_bytes(tiny_llama_folder, tmp_path):
    for name in ("a", "b"):
        export_gguf(open_source(tiny_llama_folder), tmp_path / name / "out.gguf", "Q4_0")
    assert (tmp_path / "a" / "out.gguf").read_bytes() == (tmp_path / "b" / "out.gguf").read_bytes()


def test_metadata(make_tiny_model, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    folder = make_tiny_model("llama", tmp_path / "tiny", rope_parameters=rope)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    source = open_source(folder)
    export_gguf(source, tmp_path / "out.gguf", "F16")
    header = read_gguf_header(tmp_path / "out.gguf")
    expected = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": 1,
        "llama.block_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": source.tokenizer().chat_template,
        "quantkit.source_fingerprint": source.fingerprint(),
    }
    assert {key: header.metadata[key] for key in expected} == expected
    # transformers' own frequencies: what the default ones are divided by
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, "cpu")
    default = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = torch.from_numpy(decoded(tmp_path / "out.gguf")["rope_freqs.weight"])
    torch.testing.assert_close(factors, default / frequencies)


def test_long_rope_factors(make_tiny_model, tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [float(i) for i in range(1, 9)],
        "short_factor": [1.0] * 8,
    }
    folder = make_tiny_model(
        "phi3", tmp_path / "m", rope_parameters=rope, original_max_position_embeddings=512, max_position_embeddings=2048
    )
    export_gguf(open_source(folder), tmp_path / "out.gguf", "F16")
    tensors, metadata = decoded(tmp_path / "out.gguf"), read_gguf_header(tmp_path / "out.gguf").metadata
    assert tensors["rope_factors_long.weight"].tolist() == rope["long_factor"]
    assert metadata["phi3.rope.scaling.original_context_length"] == 512
    assert metadata["phi3.rope.scaling.attn_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))


def test_what_llama_cpp_ignores_is_said(tiny_models, tmp_path):
    record = export_gguf(open_source(tiny_models("mistral")), tmp_path / "out.gguf", "F16")
    assert record["notes"] == [
        "llama.cpp ignores the sliding window of 24 tokens in a llama model: longer texts differ"
    ]


def test_split(tiny_llama_folder, tmp_path):
    source = open_source(tiny_llama_folder)
    export_gguf(source, tmp_path / "whole.gguf", "F16")
    record = export_gguf(source, tmp_path / "part.gguf", "F16", split_bytes=100_000)
    names = [file["name"] for file in record["files"]]
    assert names == [f"part-{i:05d}-of-{len(names):05d}.gguf" for i in range(1, len(names) + 1)]
    assert len(names) > 1
    together = {}
    for number, name in enumerate(names):
        assert read_gguf_header(tmp_path / name).metadata["split.no"] == number
        together |= decoded(tmp_path / name)
    whole = decoded(tmp_path / "whole.gguf")
    assert together.keys() == whole.keys()
    assert all(np.array_equal(together[name], whole[name]) for name in whole)


def test_existing_file(tiny_llama_folder, tmp_path):
    (tmp_path / "out.gguf").write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"out\.gguf exists\. Choose another name, or --overwrite"):
        export_gguf(open_source(tiny_llama_folder), tmp_path / "out.gguf", "F16")
    assert (tmp_path / "out.gguf").read_bytes() == b"precious"
    export_gguf(open_source(tiny_llama_folder), tmp_path / "out.gguf", "F16", overwrite=True)
    assert len(read_gguf_header(tmp_path / "out.gguf").tensors) == 21
    with pytest.raises(UsageError, match=r"out\.bin does not end with \.gguf"):
        export_gguf(open_source(tiny_llama_folder), tmp_path / "out.bin", "F16")


@pytest.mark.parametrize("limit", [20_000, 200_000])
def test_a_full_disk_leaves_what_was_there(limit, tiny_llama_folder, tmp_path):
    """In the header, and in the tensors."""
    source, path = open_source(tiny_llama_folder), tmp_path / "out.gguf"
    path.write_bytes(b"precious")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*out\.gguf: (File too large|the disk is full, or)"):
            export_gguf(source, path, "F32", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_terminated_it_leaves_nothing(tiny_llama_folder, tmp_path, monkeypatch):
    def terminate(self, tensor):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(export_module._Encoder, "encode", terminate)
    arguments = ["export", "gguf", str(tiny_llama_folder), "-o", str(tmp_path / "out.gguf"), "--type", "Q8_0"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 143
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_replaced_with_the_file(tiny_llama_folder, tmp_path):
    source, path = open_source(tiny_llama_folder), tmp_path / "out.gguf"
    export_gguf(source, path, "F16", split_bytes=100_000)
    manifest = json.loads((tmp_path / "out.quantkit.json").read_text())
    parts = sorted(tmp_path.glob("*.gguf"))
    assert manifest["files"] == {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}
    assert manifest["model"]["fingerprint"] == source.fingerprint()
    record = export_gguf(source, path, "Q8_0", overwrite=True)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["out.gguf", "out.quantkit.json"]
    assert json.loads((tmp_path / "out.quantkit.json").read_text())["gguf"] == record
    path.unlink()
    with pytest.raises(UsageError, match=r"out\.quantkit\.json exists"):
        export_gguf(source, path, "F16")


def test_a_gguf_as_the_model(make_tiny_model, tmp_path, monkeypatch):
    """Floats are taken, with the pre-tokenizer that the file names; codes are not."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    export_gguf(open_source(folder), tmp_path / "f16.gguf", "F16", pretokenizer="smollm")
    export_gguf(open_source(folder), tmp_path / "q8.gguf", "Q8_0")
    record = export_gguf(open_source(tmp_path / "f16.gguf"), tmp_path / "again.gguf", "Q8_0")
    assert record["notes"][0] == "the weights were read from f16.gguf as bfloat16"
    assert record["pretokenizer"] == "smollm"
    ours, theirs = (read_gguf_header(tmp_path / name).metadata for name in ("again.gguf", "f16.gguf"))
    keys = {key for key in theirs if key.startswith(("llama.", "tokenizer."))}
    assert {key: ours.get(key) for key in keys} == {key: theirs[key] for key in keys}
    once, twice = decoded(tmp_path / "q8.gguf"), decoded(tmp_path / "again.gguf")
    assert once.keys() == twice.keys()
    assert all(np.array_equal(once[name], twice[name]) for name in once)
    with pytest.raises(UsageError, match=r"q8\.gguf is quantized already \(Q8_0\)\. Give the .*--allow-requantize"):
        export_gguf(open_source(tmp_path / "q8.gguf"), tmp_path / "x.gguf", "Q4_0")
    assert not (tmp_path / "x.gguf").exists()
    record = export_gguf(open_source(tmp_path / "q8.gguf"), tmp_path / "x.gguf", "Q4_0", allow_requantize=True)
    assert "it holds codes (Q8_0), whose errors stay" in record["notes"][0]


def test_broken_weights_leave_nothing(make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        export_gguf(open_source(folder), tmp_path / "out" / "x.gguf", "Q8_0")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tensor_name_that_is_too_long(tiny_llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "MAX_NAME_BYTES", 20)
    with pytest.raises(UsageError, match=r"the tensor name blk\.0\.attn_output\.weight is longer than GGUF's 20 bytes"):
        export_gguf(open_source(tiny_llama_folder), tmp_path / "x.gguf", "F16")
    assert list(tmp_path.iterdir()) == []


def test_importance_that_lacks_some_tensors(tiny_llama_folder, tmp_path):
    """Zeros, and tensors of which nothing is known, are rounded as if every column counted the same."""
    importance = {"blk.0.attn_q.weight": torch.zeros(64), "blk.0.ffn_up.weight": torch.linspace(0, 1, 64)}
    record = export_gguf(open_source(tiny_llama_folder), tmp_path / "some.gguf", "Q4_K_M", importance=importance)
    assert record["importance_entries"] == 2
    assert all(np.isfinite(value).all() for value in decoded(tmp_path / "some.gguf").values())


def test_unknown_architecture(tiny_llama_folder, tmp_path):
    source = open_source(tiny_llama_folder)
    source.config.model_type = "mamba"
    with pytest.raises(UsageError, match=r"a mamba model cannot be written as GGUF yet\. Families that can: gemma"):
        export_gguf(source, tmp_path / "x.gguf", "F16")
    assert list(tmp_path.iterdir()) == []


def test_a_pretokenizer_that_is_unknown_or_named(tiny_llama_folder, tmp_path):
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "m")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"none of llama\.cpp's known pre-tokenizers.*--pretokenizer"):
        export_gguf(open_source(folder), tmp_path / "x.gguf", "F16")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    nearest = r"no pre-tokenizer 'qwen3' and would not load the file\. The nearest are qwen35, qwen2"
    with pytest.raises(UsageError, match=nearest):
        export_gguf(open_source(folder), tmp_path / "x.gguf", "F16", pretokenizer="qwen3")
    export_gguf(open_source(folder), tmp_path / "x.gguf", "F16", pretokenizer="qwen2")
    assert read_gguf_header(tmp_path / "x.gguf").metadata["tokenizer.ggml.pre"] == "qwen2"
    assert verify_gguf(tmp_path / "x.gguf", open_source(folder), load_model=False).ok


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ({"blk.0.attn_q.weight": torch.ones(32)}, r"importance of blk\.0\.attn_q\.weight has 32 values .* 64 columns"),
        ({"blk.0.attn_q.weight": torch.full((64,), float("nan"))}, r"importance of blk\.0\.attn_q\.weight holds NaN"),
        ({"blk.0.attn_q.weight": -torch.ones(64)}, r"holds NaN, infinity or negative values"),
        ({"blk.99.attn_q.weight": torch.ones(64)}, r"names no tensor of this model \(its first is blk\.99"),
    ],
)
def test_wrong_importance(importance, message, tiny_llama_folder, tmp_path):
    with pytest.raises(UsageError, match=message):
        export_gguf(open_source(tiny_llama_folder), tmp_path / "x.gguf", "Q4_0", importance=importance)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_refused_before_the_calibration(tiny_llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.export_gguf.request.open_source", None)
    for name in ("x.gguf", "i.gguf"):
        (tmp_path / name).write_text("mine")
    for path, matrix in (("x.gguf", None), ("y.gguf", "i.gguf")):
        request = ExportRequest(
            str(tiny_llama_folder),
            tmp_path / path,
            calibration="builtin",
            save_imatrix=tmp_path / matrix if matrix else None,
        )
        with pytest.raises(UsageError, match=rf"{matrix or path} exists\. Choose another name, or --overwrite"):
            run_export(request)


def test_a_pretokenizer_that_is_named_against_the_tokenizer_is_said(tiny_llama_folder, tmp_path):
    source = open_source(tiny_llama_folder)
    notes = export_gguf(source, tmp_path / "x.gguf", "Q8_0", pretokenizer="qwen2")["notes"]
    said = "the pre-tokenizer was named qwen2, but the tokenizer cuts text as llama.cpp's gpt-2"
    assert said in notes
    assert said in verify_gguf(tmp_path / "x.gguf", source, load_model=False).notes
    assert not any("named" in note for note in export_gguf(source, tmp_path / "y.gguf", "Q8_0")["notes"])
