"""What quantkit wrote as GGUF is a model again, also where transformers' reader of GGUF falls short."""

import copy
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.errors import SourceError
from quantkit.export_gguf import export_gguf
from quantkit.export_gguf.output_file import written_files
from quantkit.export_gguf.unigram_reader import read_unigram
from quantkit.source import open_source

IDS = torch.arange(5, 45).unsqueeze(0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SETTINGS = {
    "llama": {"rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma3": {},
    "phi3": {},
    "mixtral": {},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.mark.parametrize("family", SETTINGS)
def test_every_family_is_the_same_model_again(family, make_tiny_model, tmp_path):
    folder = make_tiny_model(family, tmp_path / "m", dtype=torch.bfloat16, **SETTINGS[family])
    export_gguf(open_source(folder), tmp_path / "out.gguf", "BF16")
    again = open_source(tmp_path / "out.gguf")
    original = json.loads((folder / "config.json").read_text())
    read = json.loads((again.folder / "config.json").read_text())
    assert {key: read.get(key) for key in original} == original
    assert torch.equal(logits(again.folder), logits(folder))


def test_parts_are_read_together(make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "BF16", split_bytes=100_000)
    first, *_, last = written_files(tmp_path / "out.gguf")
    again = open_source(first)
    assert torch.equal(logits(again.folder), logits(folder))
    with pytest.raises(SourceError, match=r"is a later part of a split GGUF\. Give the first part"):
        open_source(last)
    shutil.rmtree(tmp_path / "cache")
    last.unlink()
    with pytest.raises(SourceError, match=r"is one of \d parts, and \d are there\. Put all in one folder"):
        open_source(first)


@pytest.mark.parametrize("added", [[], ["<|turn|>"]])
def test_a_unigram_tokenizer_cuts_as_before(added, unigram, make_tiny_model, tmp_path):
    tokenizer = copy.deepcopy(unigram)
    tokenizer.add_tokens(added, special_tokens=True)
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16, vocab_size=len(tokenizer) + 3)
    for path in folder.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "BF16")
    again = open_source(tmp_path / "out.gguf").tokenizer()
    for text in ("The quick brown fox", "jumps over  the\tlazy dogs,   ", "Größe 東京 🙂🙂 x", "zz</s>Qq<|turn|>a", ""):
        ids = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert again.decode(ids) == tokenizer.decode(ids)
    assert (again.bos_token_id, again.eos_token_id, again.unk_token_id) == (1, 2, 0)
    assert len(again) == len(tokenizer)


def test_a_unigram_without_scores_is_refused():
    broken = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    with pytest.raises(SourceError, match="a Unigram of 1 tokens, 0 scores and 1 types is broken"):
        read_unigram(broken)


def test_dequantized_weights_are_the_packages(make_tiny_model, tmp_path):
    """Rows of queries go back to where they were: the error of every weight is that of its type."""
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "Q8_0")
    ours, original = open_source(tmp_path / "out.gguf"), open_source(folder)
    for name in original.tensors:
        weight = original.read(name).float()
        assert float((ours.read(name).float() - weight).norm() / weight.norm()) < 0.02, name
