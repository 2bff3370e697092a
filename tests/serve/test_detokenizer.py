"""Text in pieces: in sum the tokenizer's own text, without half characters or pieces of a stop string."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quantkit.serve.detokenizer import REPLACEMENT, IncrementalDetokenizer, decode_all, make_decode


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_llama_folder)


@pytest.fixture(scope="module")
def decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    return make_decode(tokenizer)


def sentencepiece_like() -> PreTrainedTokenizerBase:
    """As Llama 2's: a leading space that the first token loses, and bytes as fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for piece in ("▁Hello", "▁world", "▁", "!", "a", "▁a", "lo", "é"):
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode, stop)
    found = [detokenizer.append(token_id) for token_id in token_ids]
    return [*found, detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 319), max_size=30))
def test_the_pieces_are_the_text_for_any_tokens(
    token_ids: list[int], tokenizer: PreTrainedTokenizerBase, decode: Callable[[Sequence[int]], str]
) -> None:
    """Random tokens of a byte-level tokenizer are mostly broken UTF-8."""
    wanted = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces(decode, token_ids)) == wanted


SENTENCEPIECE = sentencepiece_like()
CHARACTERS = st.characters(codec="utf-8").map(lambda text: [byte + 2 for byte in text.encode()])
PIECES = st.integers(258, 265).map(lambda token_id: [token_id])


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(CHARACTERS, PIECES), max_size=12))
def test_the_pieces_are_the_text_with_leading_spaces_and_byte_fallback(parts: list[list[int]]) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    wanted = SENTENCEPIECE.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    decode = make_decode(SENTENCEPIECE)
    assert "".join(pieces(decode, token_ids)) == wanted
    assert decode_all(decode, token_ids) == wanted


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 265), max_size=20))
def test_all_at_once_is_what_comes_in_pieces_even_for_broken_bytes(token_ids: list[int]) -> None:
    decode = make_decode(SENTENCEPIECE)
    assert decode_all(decode, token_ids) == "".join(pieces(decode, token_ids))


@pytest.mark.parametrize("text", ["aé", "東京", "🙂!", "здра", "\U0010ffff", "e\u0301", "naïve 🧑\u200d🚀 ok"])
def test_a_character_comes_whole_however_many_tokens_it_has(
    text: str, tokenizer: PreTrainedTokenizerBase, decode: Callable[[Sequence[int]], str]
) -> None:
    byte_tokens = [tokenizer.convert_tokens_to_ids(piece) for byte in text.encode() for piece in [_byte_piece(byte)]]
    for token_ids in (byte_tokens, tokenizer(text, add_special_tokens=False).input_ids):
        found = pieces(decode, token_ids)
        assert "".join(found) == text
        assert REPLACEMENT not in "".join(found)
    assert len([piece for piece in pieces(decode, byte_tokens) if piece]) == len(text)


def _byte_piece(byte: int) -> str:
    """How a byte-level tokenizer writes a byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()[byte]


def test_a_half_character_at_the_end_is_replaced_as_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerBase, decode: Callable[[Sequence[int]], str]
) -> None:
    token_ids = [tokenizer.convert_tokens_to_ids(_byte_piece(byte)) for byte in "ok🙂".encode()[:-1]]
    found = pieces(decode, token_ids)
    assert found == ["o", "k", "", "", "", REPLACEMENT]


def spell(text: str) -> tuple[Callable[[Sequence[int]], str], list[int]]:
    """A decoder whose tokens are the words of a text, cut at |."""
    words = text.split("|")
    return lambda token_ids: "".join(words[token_id] for token_id in token_ids), list(range(len(words)))


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "matched"),
    [
        ("one| two| st|o|p here| more", ["stop"], "one two ", "stop"),  # over three tokens
        ("one| st|ill| going", ["stop"], "one still going", None),
        ("a|b|c", ["c"], "ab", "c"),
        ("abcabd|x", ["abd"], "abc", "abd"),
        ("aab|x", ["ab"], "a", "ab"),
        ("xabcx", ["abc", "b"], "xa", "b"),  # b is complete first, whatever the tokens are
        ("xab|cx", ["abc", "b"], "xa", "b"),
        ("xabx", ["b", "ab"], "x", "ab"),  # complete at the same time: the longer one
        ("ends with sto", ["stop"], "ends with sto", None),
        ("stop", ["stop"], "", "stop"),
        ("日|本|語", ["本語"], "日", "本語"),
    ],
)
def test_stop_strings(text: str, stop: list[str], wanted: str, matched: str | None) -> None:
    decode, token_ids = spell(text)
    detokenizer = IncrementalDetokenizer(decode, stop)
    found = ""
    for token_id in token_ids:
        found += detokenizer.append(token_id)
        assert wanted.startswith(found)  # nothing is ever taken back
        if detokenizer.matched_stop is not None:
            break
    assert found + detokenizer.flush() == wanted
    assert detokenizer.matched_stop == matched


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text(alphabet="ab|.", min_size=1, max_size=4), min_size=1, max_size=12),
    stop=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_do_not_depend_on_where_tokens_end(words: list[str], stop: list[str]) -> None:
    text = "".join(words)
    wanted = text
    for end in range(1, len(text) + 1):  # character by character
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            wanted = text[: end - max(map(len, found))]
            break

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[token_id] for token_id in token_ids)

    detokenizer = IncrementalDetokenizer(decode, stop)
    released = ""
    for token_id in range(len(words)):
        released += detokenizer.append(token_id)
        if detokenizer.matched_stop is not None:
            break
    assert released + detokenizer.flush() == wanted
