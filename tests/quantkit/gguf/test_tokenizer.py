"""Vocabularies: what llama.cpp will merge, and how its pre-tokenizer is told from a tokenizer's rules."""

import json

import pytest
from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantkit.errors import UsageError
from quantkit.export_gguf.pretokenizer import identify_pretokenizer
from quantkit.export_gguf.tokenizer import read_vocabulary

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ONLY = BYTE_LEVEL | {"use_regex": False}
# As they stand in the tokenizer.json of Llama 3 and of Qwen 2.5.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def split(regex):
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTES_ONLY]}


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (BYTE_LEVEL, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}, "smollm"),
        (split(LLAMA3), "llama-bpe"),
        (split(QWEN2), "qwen2"),
    ],
)
def test_known_rules(rules, name):
    assert identify_pretokenizer(rules) == name


@pytest.mark.parametrize("rules", [None, split("[a-z]+"), {"type": "Whitespace"}, BYTES_ONLY])
def test_unknown_rules(rules):
    with pytest.raises(UsageError, match=r"none of llama\.cpp's known pre-tokenizers\. Name .* --pretokenizer \(gpt-2"):
        identify_pretokenizer(rules)


def test_byte_level_vocabulary(tiny_llama_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    vocabulary = read_vocabulary(tokenizer, tiny_llama_folder, 324)
    assert (vocabulary.model, vocabulary.pretokenizer, vocabulary.scores) == ("gpt2", "gpt-2", None)
    assert vocabulary.tokens[:5] == ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    assert vocabulary.types[:6] == [*[TokenType.CONTROL] * 5, TokenType.NORMAL]
    assert vocabulary.tokens[320:] == ["[PAD320]", "[PAD321]", "[PAD322]", "[PAD323]"]
    assert vocabulary.types[320:] == [TokenType.UNUSED] * 4
    assert vocabulary.notes == ["4 rows of the embedding have no token: the file calls them [PAD...]"]
    merges = json.loads((tiny_llama_folder / "tokenizer.json").read_text())["model"]["merges"]
    assert vocabulary.merges == [" ".join(pair) for pair in merges]
    assert read_vocabulary(tokenizer, tiny_llama_folder, 320, "qwen2").pretokenizer == "qwen2"


def test_more_tokens_than_rows(tiny_llama_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    with pytest.raises(UsageError, match=r"the tokenizer has ids up to 319 and the embedding 300 rows"):
        read_vocabulary(tokenizer, tiny_llama_folder, 300)


@pytest.fixture
def sentencepiece():
    """A BPE with byte fallback, as transformers makes it of a SentencePiece model."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    bpe = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "b"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_sentencepiece_vocabulary(sentencepiece, tmp_path):
    vocabulary = read_vocabulary(sentencepiece, tmp_path, 265)
    assert (vocabulary.model, vocabulary.merges) == ("llama", None)
    assert vocabulary.types[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert vocabulary.types[259] == TokenType.NORMAL
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert score["▁a"] > score["▁ab"] > score["ab"] > score["a"]  # what is merged first scores highest


def test_other_kinds_of_tokenizer(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UsageError, match=r"a WordLevel tokenizer cannot be written as GGUF yet"):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=words), tmp_path, 2)
