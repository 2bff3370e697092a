"""Models from folders, the hub's cache and .gguf files; transformers and safetensors are the independent readers."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit.errors import SourceError
from quantkit.source import open_source
from quantkit.source.folder import first_line

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "mixtral"]
PROMPT = torch.tensor(
    [[1, 77, 130, 201, 9, 300, 45, 46, 47, 250, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26]]
)


@pytest.fixture
def model_folder(tiny_llama_folder, tmp_path):
    """A copy of the tiny Llama that a test may break."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


@pytest.fixture
def sharded_folder(tiny_llama_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


# --- the skeleton ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_filled_skeleton_is_the_model(tiny_models, make_tiny_model, tmp_path, family, dtype):
    folder = tiny_models(family)
    if dtype == torch.bfloat16:
        folder = make_tiny_model(family, tmp_path / family, dtype=dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    source = open_source(folder)
    model = source.skeleton()
    assert source.dtype == dtype
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    buffers = dict(reference.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype, name
        assert torch.equal(buffer, buffers[name]), name
    source.materialize(model)
    expected = dict(reference.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, expected[name]), name
    assert torch.equal(logits(model), logits(reference))
    assert source.weight_map(model).unused == []


def test_assigning_tensors_by_name_fills_the_skeleton(tiny_llama_folder):
    source = open_source(tiny_llama_folder)
    model = source.skeleton()
    model.load_state_dict({name: source.read(name) for name in source.tensors}, assign=True)
    reference = AutoModelForCausalLM.from_pretrained(tiny_llama_folder).eval()
    assert torch.equal(logits(model), logits(reference))


def test_one_block_at_a_time(tiny_models):
    source = open_source(tiny_models("mixtral"))
    model = source.skeleton()
    source.materialize(model, prefix="model.layers.1", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (not name.startswith("model.layers.1.")), name
    assert {parameter.dtype for parameter in model.model.layers[1].parameters()} == {torch.bfloat16}
    with pytest.raises(SourceError, match=r"no tensor missing\.weight"):
        source.read("missing.weight")


def test_fused_experts_map_to_their_tensors_on_disk(tiny_models):
    source = open_source(tiny_models("mixtral"))
    model = source.skeleton()
    weights = source.weight_map(model)
    gate_up = weights.names["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up[0] == "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert len(gate_up) == 8
    assert weights.tensor_name("model.layers.0.mlp.gate.weight") == "model.layers.0.block_sparse_moe.gate.weight"
    assert weights.tensor_name("model.layers.1.self_attn.q_proj.weight") == "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(SourceError, match="gate_up_proj is made of 8 tensors"):
        weights.tensor_name("model.layers.0.mlp.experts.gate_up_proj")
    assert {name for names in weights.names.values() for name in names} == set(source.tensors)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tied_weights_are_one_parameter(make_tiny_model, tmp_path, family):
    source = open_source(make_tiny_model(family, tmp_path / "m", tie_word_embeddings=True))
    model = source.skeleton()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    source.materialize(model, prefix="lm_head")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta
    assert source.weight_map(model).tensor_name("lm_head.weight") == "model.embed_tokens.weight"


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice(make_tiny_model, tmp_path, equal):
    folder = make_tiny_model("llama", tmp_path / "m", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if equal else 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    model = source.skeleton()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
    source.materialize(model)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(model), logits(reference))
    assert source.weight_map(model).unused == []


def test_tensors_that_no_parameter_takes_are_listed(model_folder):
    tensors = load_file(model_folder / "model.safetensors")
    tensors["model.mtp.head.weight"] = torch.ones(3)
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(model_folder)
    assert source.weight_map(source.skeleton()).unused == ["model.mtp.head.weight"]


def test_a_parameter_without_a_tensor(model_folder):
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(model_folder)
    with pytest.raises(SourceError, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        source.materialize(source.skeleton())


def test_config_and_tensor_disagree(model_folder):
    edit_config(model_folder, intermediate_size=96)
    source = open_source(model_folder)
    with pytest.raises(SourceError, match=r"down_proj\.weight has .*\[64, 128\], .* asks for \[64, 96\]"):
        source.weight_map(source.skeleton())


# --- tensors --------------------------------------------------------------------------------------------------------


def test_sharded_folder_reads_as_safetensors_does(sharded_folder):
    source = open_source(sharded_folder)
    shards = sorted(sharded_folder.glob("*.safetensors"))
    assert len(shards) > 2
    seen = {}
    for shard in shards:
        for name, expected in load_file(shard).items():
            seen[name] = shard.name
            info = source.tensors[name]
            assert (info.dtype, info.shape, info.shard) == (expected.dtype, tuple(expected.shape), shard.name)
            assert info.nbytes == expected.nbytes
            assert torch.equal(source.read(name), expected)
            path, slot = source.locate(name)
            assert path.read_bytes()[slot.offset : slot.offset + info.nbytes] == expected.numpy().tobytes()
    assert seen.keys() == source.tensors.keys()


def test_opening_reads_headers_only(model_folder):
    """A shard of 3 GB that is one hole: nobody reads it to the end."""
    header = json.dumps({"big": {"dtype": "I8", "shape": [3_000_000_000], "data_offsets": [0, 3_000_000_000]}}).encode()
    with (model_folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 3_000_000_000)
    source = open_source(model_folder)
    assert source.tensors["big"].nbytes == 3_000_000_000
    assert source.read("big")[2_345_678_901] == 0  # mapped, not loaded


def test_side_files(model_folder):
    for name in ("README.md", "merges.txt", "modeling_own.py", "pytorch_model.bin", ".gitattributes", "quantkit.json"):
        (model_folder / name).write_text("x")
    (model_folder / "additional_chat_templates").mkdir()
    (model_folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    assert [str(path.relative_to(model_folder)) for path in open_source(model_folder).side_files()] == [
        "README.md",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "modeling_own.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_fingerprint_follows_the_content(model_folder, tmp_path):
    copy = Path(shutil.copytree(model_folder, tmp_path / "copy"))
    first = open_source(model_folder).fingerprint()
    assert len(first) == 64
    assert open_source(copy).fingerprint() == first
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert open_source(copy).fingerprint() != first
    edit_config(model_folder, rms_norm_eps=1e-4)
    assert open_source(model_folder).fingerprint() != first


def test_already_quantized_model_says_so(model_folder):
    assert open_source(model_folder).quantization is None
    edit_config(model_folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64})
    source = open_source(model_folder)
    assert source.quantization == {"quant_method": "gptq", "bits": 4, "group_size": 64}
    assert not hasattr(source.skeleton().config, "quantization_config")


def test_tokenizer(model_folder, tmp_path):
    source = open_source(model_folder)
    assert source.tokenizer() is source.tokenizer()
    assert source.tokenizer().eos_token_id == 2
    for path in model_folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SourceError, match=r"has no tokenizer\. Copy its files"):
        open_source(model_folder).tokenizer()


# --- broken input: one line that names the file ---------------------------------------------------------------------


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def corrupt_header(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("]")
    path.write_bytes(data)


def huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_gguf(folder):
    (folder / "model.safetensors").rename(folder / "model-Q4_0.gguf")


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


BROKEN = {
    truncate: r"model\.safetensors is no whole safetensors file: it is truncated: \d+ bytes, .* Download it again",
    corrupt_header: r"model\.safetensors is no whole safetensors file: its header is not JSON",
    huge_header: r"model\.safetensors is no whole safetensors file: its header should have",
    only_pickles: r"only as pytorch_model\.bin, a pickle .* save_pretrained",
    only_gguf: r"has no model\.safetensors\. Give the file itself: .*model-Q4_0\.gguf",
    empty: r"has no config\.json",
    lambda folder: (folder / "config.json").unlink(): r"has no config\.json",
    lambda folder: (folder / "config.json").write_text("{"): r"config\.json is no valid JSON",
    lambda folder: (folder / "config.json").write_text("[]"): r"config\.json holds no JSON object",
    lambda folder: (folder / "model.safetensors").write_bytes(b"abc"): r"it is only 3 bytes long",
    lambda folder: (folder / "model.safetensors").unlink(): r"no model\.safetensors and no model\.safetensors\.index",
    lambda folder: edit_config(
        folder, model_type="nonsense", architectures=None
    ): r"transformers cannot read .*config\.json",
    lambda folder: edit_config(folder, is_encoder_decoder=True): r"encoder-decoder model \(llama\)",
    lambda folder: edit_config(folder, vision_config={}): r"more than text \(llama has vision_config\)",
    lambda folder: edit_config(folder, architectures=["LlamaForSequenceClassification"]): r"no causal decoder that",
    lambda folder: edit_config(
        folder, architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "x.Y"}
    ): r"its own code",
    lambda folder: edit_config(
        folder, architectures=None, model_type="own", auto_map={"AutoConfig": "x.Y"}
    ): r"its own code for the model type own, which is not supported yet$",
    lambda folder: edit_config(folder, architectures=None, model_type="vit"): r"vit model, which is no causal decoder",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__.replace("<lambda>", "case"))
def test_broken_folder(model_folder, damage):
    damage(model_folder)
    with pytest.raises(SourceError, match=BROKEN[damage]) as caught:
        open_source(model_folder)
    assert "\n" not in str(caught.value)
    assert str(model_folder) in str(caught.value)


def test_missing_shard_and_index_that_lies(sharded_folder):
    shards = sorted(sharded_folder.glob("*.safetensors"))
    held = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(SourceError, match=f"lacks {shards[1].name}, which its index names"):
        open_source(sharded_folder)
    shards[1].write_bytes(held[: len(held) // 2])
    with pytest.raises(SourceError, match=f"{shards[1].name} is no whole safetensors file: it is truncated"):
        open_source(sharded_folder)
    shards[1].write_bytes(held)
    index_path = sharded_folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.ghost.weight"] = shards[0].name
    index_path.write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"lacks the tensor model\.ghost\.weight"):
        open_source(sharded_folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/folder", "no such folder: no/such/folder"),
        ("./here", "no such folder: here"),
        ("missing.gguf", "no such file: missing.gguf"),
        (Path("owner/name"), "no such folder: owner/name"),
        ("owner/name with spaces", "no such folder: owner/name with spaces"),
    ],
)
def test_path_that_does_not_exist(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message):
        open_source(model)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match=r"neither a folder nor a \.gguf file"):
        open_source(tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 65}, r"hidden size \(65\) is not a multiple of the number of attention heads \(4\)"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"hidden_size": -64}, "."),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "no such type", "rope_theta": 1}}, "."),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(model_folder, changes, words):
    edit_config(model_folder, **changes)
    with pytest.raises(SourceError, match=words) as caught:
        open_source(model_folder).skeleton()
    assert "\n" not in str(caught.value)
    assert str(model_folder) in str(caught.value)


def test_a_model_without_tokenizer_says_what_to_copy(model_folder):
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"model has no tokenizer\. Copy its files, such as tokenizer.json or"):
        open_source(model_folder).tokenizer()
    (model_folder / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match=r"has no tokenizer that loads: .+[^:]$") as caught:
        open_source(model_folder).tokenizer()
    assert "\n" not in str(caught.value)


def test_somebody_else_s_error_becomes_one_line():
    text = "Cannot read it from one of: \n(1) a file, \n(2) a folder.\n\nYou can update the library"
    assert first_line(ValueError(text)) == "Cannot read it from one of: (1) a file, (2) a folder"
    assert len(first_line(ValueError("x" * 5000))) <= 300
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(model_folder, monkeypatch, name):
    monkeypatch.chdir(model_folder)
    assert open_source(".").name == "model"
    with pytest.raises(SourceError, match="the model's name is empty"):
        open_source(name)


def test_a_block_more_than_config_json_asks_for_is_refused_and_an_extra_is_not(model_folder):
    source = open_source(model_folder)
    assert source.weight_map(source.skeleton()).unused == []
    edit_config(model_folder, num_hidden_layers=1)
    source = open_source(model_folder)
    with pytest.raises(SourceError, match=r"hold the block model.layers.1, and config.json asks for 1 blocks only"):
        source.weight_map(source.skeleton())
    tensors = load_file(model_folder / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}  # no whole block
    save_file(some, model_folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(model_folder)
    unused = source.weight_map(source.skeleton()).unused
    assert unused
    assert all("layers.1." in name for name in unused)
