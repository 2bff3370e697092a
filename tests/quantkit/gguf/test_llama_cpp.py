"""Against llama.cpp itself, where llama-cpp-python is installed: quantizers, decoders, tokenizer and text."""

import ctypes
import importlib.util
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from quantkit.export_gguf import export_gguf
from quantkit.export_gguf.mixes import FILE_TYPES
from quantkit.formats.gguf.block_types import BLOCK_TYPES
from quantkit.formats.gguf.blocks import PLAINLY_ROUNDED, encode_rows
from quantkit.source import open_source

SPEC = importlib.util.find_spec("llama_cpp")
pytestmark = pytest.mark.skipif(SPEC is None, reason="llama-cpp-python is not installed: pip install llama-cpp-python")


class TypeTraits(ctypes.Structure):
    """The beginning of ggml_type_traits, as ggml.h has it."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def ggml():
    folder = Path(SPEC.submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_void_p,
    ]
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    return library


@pytest.fixture(scope="module")
def rows():
    """Rows with heavy tails, as trained weights have them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 1024, generator=generator) * torch.randn(64, 1024, generator=generator).exp() * 0.02


@pytest.fixture(scope="module")
def importance():
    return torch.randn(1024, generator=torch.Generator().manual_seed(1)).exp()


def quantize(library, rows, block_type, importance):
    source = np.ascontiguousarray(rows.numpy())
    encoded = np.zeros((rows.shape[0], rows.shape[1] // block_type.block * block_type.block_bytes), np.uint8)
    measure = None if importance is None else np.ascontiguousarray(importance.numpy()).ctypes.data
    kind = int(block_type.ggml)
    library.ggml_quantize_init(kind)
    library.ggml_quantize_chunk(kind, source.ctypes.data, encoded.ctypes.data, 0, *source.shape, measure)
    return encoded


def error(encoded, block_type, rows, importance):
    decoded = torch.from_numpy(gguf.quants.dequantize(encoded, block_type.ggml))
    return float(((decoded - rows).square() * importance).sum())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_its_decoder_reads_what_the_gguf_package_reads(name, ggml, rows, importance):
    block_type = BLOCK_TYPES[name]
    encoded = encode_rows(rows, name, importance).numpy()
    decoded = np.zeros(rows.shape, np.float32)
    traits = ggml.ggml_get_type_traits(int(block_type.ggml)).contents
    to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(traits.to_float)
    to_float(encoded.ctypes.data, decoded.ctypes.data, rows.numel())
    assert np.array_equal(decoded, gguf.quants.dequantize(encoded, block_type.ggml))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_no_more_error_than_its_quantizer(name, ggml, rows, importance):
    block_type = BLOCK_TYPES[name]
    plain = quantize(ggml, rows, block_type, None)
    if name in PLAINLY_ROUNDED:
        assert np.array_equal(encode_rows(rows, name).numpy(), plain)
    theirs = error(quantize(ggml, rows, block_type, importance), block_type, rows, importance)
    ours = error(encode_rows(rows, name, importance).numpy(), block_type, rows, importance)
    assert ours < 1.005 * theirs


TEXTS = [
    "Hello, world! 12345",
    "Größe, naïve, 東京, здравствуй, 🙂",
    "  two  spaces\n\n\tand a tab",
    "<|im_start|>user\nHi<|im_end|>",
]


def with_tokenizer(tokenizer, folder, make_tiny_model):
    """A tiny Llama with another tokenizer."""
    make_tiny_model("llama", folder, vocab_size=len(tokenizer))
    for path in folder.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    return open_source(folder)


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox",
        "jumps over  the\tlazy dogs,   ",
        "Größe, naïve, 東京, здравствуй, 🙂🙂 x",
        "zzz</s>Qqq",
        "",
    ],
)
def test_unigram_ids(text, unigram, make_tiny_model, tmp_path):
    from llama_cpp import Llama

    source = with_tokenizer(unigram, tmp_path / "model", make_tiny_model)
    export_gguf(source, tmp_path / "out.gguf", "F32")
    engine = Llama(str(tmp_path / "out.gguf"), vocab_only=True, verbose=False)
    expected = unigram(text, add_special_tokens=False)["input_ids"]
    assert engine.tokenize(text.encode(), add_bos=False, special=True) == expected


# What llama.cpp takes from nowhere else: all blocks of a Gemma 3 this shallow attend to a window.
SETTINGS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "mistral": {"sliding_window": None},
    "gemma3": {"layer_types": ["sliding_attention"] * 2},
    "mixtral": {},
}
OTHERS = {
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "norm_topk_prob": True},
    ),
}


def make_other(family, tokenizer_folder, folder):
    """A tiny model of a family that is not among the shared ones."""
    name, settings = OTHERS[family]
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, name)(**shape, **heads, **settings, max_position_embeddings=256, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / file, folder)
    return folder


@pytest.mark.parametrize("family", [*SETTINGS, *OTHERS])
def test_it_writes_the_same_text(family, make_tiny_model, tiny_llama_folder, tmp_path):
    from llama_cpp import Llama

    if family in OTHERS:
        folder = make_other(family, tiny_llama_folder, tmp_path / "model")
    else:
        folder = make_tiny_model(family, tmp_path / "model", **SETTINGS[family])
    source = open_source(folder)
    export_gguf(source, tmp_path / "out.gguf", "F32")
    engine = Llama(str(tmp_path / "out.gguf"), n_ctx=256, verbose=False)
    tokenizer = source.tokenizer()
    for text in TEXTS:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert engine.tokenize(text.encode(), add_bos=False, special=True) == expected
    prompt = list(range(5, 25))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    written = []
    for token in engine.generate(prompt, temp=0.0, repeat_penalty=1.0):
        written.append(token)
        if len(written) == 16:
            break
    assert written == expected[0, len(prompt) :].tolist()


def test_it_loads_a_file_of_chosen_types(wide_model, tmp_path, capfd):
    """Its label has llama.cpp's own mark for a guess, which it shows."""
    from llama_cpp import Llama

    overrides = [(r"blk\..*_(q|k|v|output|gate|up)\.weight", "Q5_1")]
    record = export_gguf(open_source(wide_model), tmp_path / "out.gguf", "Q4_K_M", overrides=overrides)
    assert record["file_type"] == "mostly Q5_1"
    engine = Llama(str(tmp_path / "out.gguf"), n_ctx=64, verbose=True)
    assert engine.metadata["general.file_type"] == str(9 + 1024)
    assert "file type   = (guessed) Q5_1" in capfd.readouterr().err


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_every_type_gives_the_answers_of_what_it_decodes_to(file_type, wide_model, tmp_path, monkeypatch):
    """llama.cpp rounds the inputs of its products to 8 bits: its logits are near; wrong weights give 1 and more."""
    from llama_cpp import Llama

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    export_gguf(open_source(wide_model), tmp_path / "out.gguf", file_type)
    prompt = list(range(5, 25))
    engine = Llama(str(tmp_path / "out.gguf"), n_ctx=64, logits_all=True, verbose=False)
    engine.eval(prompt)
    found = torch.from_numpy(engine.scores[: len(prompt)].copy())
    decoded = open_source(tmp_path / "out.gguf").folder
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).eval()
        expected = model(torch.tensor([prompt])).logits[0]
    assert float((found - expected).norm() / expected.norm()) < 0.2
