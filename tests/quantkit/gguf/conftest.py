"""A Unigram tokenizer as SentencePiece models become in transformers, with its replacements of characters."""

import struct

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog while the rain in the north keeps falling on the stones.",
    "A model reads the prompt, predicts the next token, and stops when the answer is complete.",
    "Größe, naïve, 東京, здравствуй",
] * 4


@pytest.fixture(scope="session")
def unigram_charsmap() -> bytes:
    """Replaces a tab by a space: a double array of one key, as SentencePiece stores them.

    A unit is label | has_leaf << 8 | offset << 10. From the root (offset 16) the byte 9 leads to unit 16 ^ 9, from
    there (offset 1) its leaf lies in unit 25 ^ 1; it is the place of the replacement in what follows.
    """
    units = [0] * 512
    units[0], units[25], units[24] = 16 << 10, 9 | 1 << 8 | 1 << 10, 1 << 31
    array = struct.pack("<512I", *units)
    return struct.pack("<I", len(array)) + array + b" \x00"


@pytest.fixture(scope="session")
def unigram(unigram_charsmap: bytes) -> PreTrainedTokenizerFast:
    """Unknown, begin and end first; spaces count once, and one stands before the text."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(unigram_charsmap),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False, shrinking_factor=0.75
    )
    backend.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def wide_model(make_tiny_model, tmp_path_factory):
    """Rows of 256 and 512 columns, which every block divides."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_tiny_model("llama", folder, hidden_size=256, intermediate_size=512, head_dim=64)
