"""Vocabularies: what llama.cpp will merge, and how its pre-tokenizer is told from a tokenizer's rules."""

import json
import struct

import pytest
from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantkit.errors import UsageError
from quantkit.export_gguf import export_gguf
from quantkit.export_gguf.pretokenizer import identify_pretokenizer
from quantkit.export_gguf.tokenizer import read_vocabulary
from quantkit.export_gguf.unigram import Normalization
from quantkit.formats.gguf.header import read_gguf_header
from quantkit.source import open_source

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


def piece(text, score, kind=1):
    """A piece of sentencepiece_model.proto: text is field 1, the score field 2 (a float), the type field 3."""
    message = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score)
    message += b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(message)]) + message


def test_scores_of_the_sentencepiece_model_in_the_folder(sentencepiece, tmp_path):
    scores = {"<unk>": 0.0, "▁a": -0.5, "▁ab": -1.25, "ab": -7.0}
    content = b"".join(piece(text, score) for text, score in scores.items())
    trainer = b"\x12\x02\x18\x02"  # field 2 of the model, whose field 3 is 2: BPE
    (tmp_path / "tokenizer.model").write_bytes(content + trainer)
    vocabulary = read_vocabulary(sentencepiece, tmp_path, 265)
    score = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    assert {name: score[name] for name in scores} == scores
    assert score["a"] == -1e6
    (tmp_path / "tokenizer.model").write_bytes(content + piece("elsewhere", -1.0))  # of another model: not used
    assert read_vocabulary(sentencepiece, tmp_path, 265).scores != vocabulary.scores
    for broken in (content[:-3], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x0b\x00", b"\x80"):
        (tmp_path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(UsageError, match=r"tokenizer\.model is no SentencePiece model"):
            read_vocabulary(sentencepiece, tmp_path, 265)


def test_unigram_vocabulary(unigram, unigram_charsmap, tmp_path):
    vocabulary = read_vocabulary(unigram, tmp_path, len(unigram) + 2)
    assert (vocabulary.model, vocabulary.pretokenizer, vocabulary.merges) == ("t5", "default", None)
    stored = json.loads(unigram.backend_tokenizer.to_str())["model"]["vocab"]
    assert vocabulary.tokens[: len(stored)] == [text for text, _ in stored]
    assert vocabulary.scores[: len(stored)] == [score for _, score in stored]
    assert vocabulary.types[:3] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    assert vocabulary.types[-2:] == [TokenType.UNUSED] * 2
    assert set(vocabulary.types[3:-2]) == {TokenType.NORMAL}
    assert vocabulary.normalization == Normalization(unigram_charsmap, remove_extra_whitespaces=True)


def test_unigram_metadata(unigram, unigram_charsmap, make_tiny_model, tmp_path):
    folder = make_tiny_model("llama", tmp_path / "m", vocab_size=len(unigram))
    for path in folder.glob("*token*"):
        path.unlink()
    unigram.save_pretrained(folder)
    export_gguf(open_source(folder), tmp_path / "out.gguf", "F16")
    metadata = read_gguf_header(tmp_path / "out.gguf").metadata
    expected = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: metadata[key] for key in expected} == expected
    assert bytes(x & 255 for x in metadata["tokenizer.ggml.precompiled_charsmap"]) == unigram_charsmap


def test_unigram_with_bytes_is_said_to_differ(unigram, tmp_path):
    document = json.loads(unigram.backend_tokenizer.to_str())
    document["model"]["byte_fallback"] = True
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(document)))
    (note,) = read_vocabulary(other, tmp_path, len(unigram)).notes
    assert note.startswith("llama.cpp makes one unknown token of characters")


@pytest.mark.parametrize(
    ("part", "rules", "message"),
    [
        ("normalizer", normalizers.Lowercase(), "normalizes text by Lowercase, which llama"),
        ("normalizer", normalizers.Sequence([normalizers.NFKC()]), "normalizes text by NFKC, which llama"),
        ("pre_tokenizer", pre_tokenizers.Punctuation(), "cuts text by Punctuation, which llama"),
    ],
)
def test_unigram_rules_that_llama_cpp_has_not(part, rules, message, unigram, tmp_path):
    backend = Tokenizer.from_str(unigram.backend_tokenizer.to_str())
    setattr(backend, part, rules)
    with pytest.raises(UsageError, match=message):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend), tmp_path, len(unigram))


def test_other_kinds_of_tokenizer(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UsageError, match=r"a WordLevel tokenizer cannot be written as GGUF yet"):
        read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=words), tmp_path, 2)
