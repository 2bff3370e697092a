"""A .gguf as MODEL: the gguf package writes and reads, transformers dequantizes, llama.cpp's layout is written here."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.errors import SourceError
from quantkit.formats.gguf.header import GgufHeaderError, read_gguf_header
from quantkit.source import gguf as gguf_source
from quantkit.source import open_source

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama_cpp_rows(weight, num_heads):
    """The order of a head's rows in llama.cpp: the two halves of the rotary pairs interleaved."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, folder, *, architecture="llama", extra=None, tensors=None):
    """The tiny Llama as llama.cpp's converter would lay it out, in float32."""
    config = open_source(folder).config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = tokenizer.get_vocab()
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    special = set(tokenizer.all_special_ids) | {3, 4}
    writer.add_token_types([3 if token in special else 1 for token in range(len(vocabulary))])
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    if tensors is None:
        tensors = {}
        for name, value in load_file(folder / "model.safetensors").items():
            tensors |= llama_cpp_tensor(name, value.numpy(), config)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp_tensor(name, value, config):
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    outside["lm_head.weight"] = "output.weight"
    if name in outside:
        return {outside[name]: value}
    _, _, number, rest = name.split(".", 3)
    part = rest.removesuffix(".weight")
    if part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
        value = np.ascontiguousarray(llama_cpp_rows(value, heads))
    return {f"blk.{number}.{NAMES[part]}.weight": value}


@pytest.fixture
def tiny_gguf(tiny_llama_folder, tmp_path, monkeypatch):
    """Writes the tiny Llama as a .gguf, with a cache of its own."""
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return lambda **options: write_gguf(tmp_path / "tiny.gguf", tiny_llama_folder, **options)


def test_gguf_becomes_the_model_that_it_was_made_of(tiny_gguf, tiny_llama_folder, tmp_path):
    path = tiny_gguf(extra={"tokenizer.ggml.eot_token_id": 4})
    source = open_source(path)
    assert (source.name, source.kind, source.revision) == ("tiny.gguf", "gguf", None)
    assert source.file_bytes == path.stat().st_size
    assert source.folder.is_relative_to(tmp_path / "cache")
    assert source.quantization is None
    assert source.dtype == torch.bfloat16
    expected = load_file(tiny_llama_folder / "model.safetensors")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(source.read(name), tensor.bfloat16()), name
    original = AutoTokenizer.from_pretrained(tiny_llama_folder)
    text = 'The station {"a": 1} Größe<|im_end|>'
    assert source.tokenizer()(text)["input_ids"] == original(text)["input_ids"]
    assert source.tokenizer().chat_template == original.chat_template
    model = AutoModelForCausalLM.from_pretrained(source.folder)
    assert model.generation_config.eos_token_id == [2, 4]  # a chat also ends at the end of the turn


def test_what_lies_beside_a_gguf_does_not_matter(tiny_gguf, tiny_llama_folder, tmp_path):
    path = tiny_gguf()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_llama_folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer, original = open_source(path).tokenizer(), AutoTokenizer.from_pretrained(tiny_llama_folder)
    assert tokenizer.chat_template == original.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == (original.bos_token, original.eos_token)


def test_second_opening_reuses_the_folder(tiny_gguf, tmp_path, monkeypatch):
    path = tiny_gguf()
    first = open_source(path)
    monkeypatch.setattr(gguf_source, "_write_folder", lambda *args: pytest.fail("converted a second time"))
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert open_source(copy).folder == first.folder


def test_conversion_that_is_interrupted_leaves_nothing(tiny_gguf, tmp_path, monkeypatch):
    path = tiny_gguf()

    def interrupted(*args):
        (args[1] / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_source, "_write_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_source(path)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    assert len(open_source(path).tensors) == 21


def test_cache_that_cannot_be_written(tiny_gguf, tmp_path, monkeypatch):
    path = tiny_gguf()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"cannot write the cache .* Set QUANTKIT_CACHE"):
        open_source(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "nonsense"},
            r"architecture nonsense\): GGUF model with architecture nonsense is not supported",
        ),
        ({"extra": {"split.count": 3}}, r"one part of a split GGUF"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, r"scales its positions \(yarn\), which transformers ignores"),
        ({"tensors": {"token_embd.weight": np.zeros((320, 64), np.float32)}}, r"has no weights for model\.layers"),
    ],
    ids=["architecture", "split", "rope", "weights"],
)
def test_gguf_that_would_lose_something(tiny_gguf, tmp_path, options, message):
    path = tiny_gguf(**options)
    with pytest.raises(SourceError, match=message) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)
    assert "tiny.gguf" in str(caught.value)
    cache = tmp_path / "cache" / "gguf"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_rotary_factors_are_refused(tiny_gguf, tiny_llama_folder):
    config = open_source(tiny_llama_folder).config
    tensors = {"rope_freqs.weight": np.full(8, 4.0, np.float32)}
    for name, value in load_file(tiny_llama_folder / "model.safetensors").items():
        tensors |= llama_cpp_tensor(name, value.numpy(), config)
    with pytest.raises(SourceError, match=r"rope_freqs\.weight, which transformers ignores"):
        open_source(tiny_gguf(tensors=tensors))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-10], r"it is truncated: \d+ bytes"),
        (lambda data: data[:500], r"it ends inside its header"),
        (lambda data: data[:10], r"it is only 10 bytes long"),
        (lambda data: b"GGML" + data[4:], r"it begins with b'GGML'"),
        (lambda data: data[:4] + b"\x09" + data[5:], r"its format version is 9"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], r"it ends inside its header|unknown type"),
    ],
    ids=["data", "header", "short", "magic", "version", "count"],
)
def test_broken_gguf(tiny_gguf, damage, message):
    path = tiny_gguf()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=rf"tiny\.gguf is no whole GGUF file: {message}"):
        open_source(path)


def test_header_is_what_the_gguf_package_reads(tiny_gguf):
    path = tiny_gguf(extra={"llama.rope.scaling.type": "none"})
    header = read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    assert len(header.tensors) == 21
    assert [(t.name, t.type_name, t.shape, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape)), t.n_bytes) for t in reader.tensors
    ]
    assert header.metadata.keys() == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, value in header.metadata.items():
        expected = reader.fields[key].contents()
        assert (list(value) if isinstance(value, tuple) else value) == expected, key


def test_header_of_no_file(tmp_path):
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(GgufHeaderError, match="only 0 bytes"):
        read_gguf_header(tmp_path / "empty.gguf")


@pytest.mark.slow
def test_smollm2_answers(smollm2_gguf):
    """Real input: the chat template and the tokenizer come along, and the model makes sense."""
    source = open_source(smollm2_gguf)
    assert len(source.tensors) == 272
    assert source.config.model_type == "llama"
    assert source.dtype == torch.bfloat16
    model = source.skeleton()
    source.materialize(model, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = source.tokenizer()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    assert tokenizer.decode(ids[0]).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=2)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
