"""What each token of a vocabulary stands for, in bytes: the alphabet of grammars, and of log-probabilities."""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantkit.errors import UsageError

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[bytes]:
    """The bytes of every token id; of tokens that have no text (special or unused ones) none.

    Args:
        tokenizer: a fast one, whose decoder is byte-level (GPT-2, Llama 3, Qwen) or falls back to bytes (Llama 2,
            Mistral, Gemma).
        vocab_size: of the model, which may be larger than the tokenizer's.

    Raises:
        UsageError: the tokenizer is of another kind.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    kinds = set() if backend is None or backend.decoder is None else _decoder_kinds(json.loads(_state(backend.decoder)))
    if not kinds & {"ByteLevel", "ByteFallback"}:
        name = type(tokenizer).__name__
        raise UsageError(f"the tokenizer ({name}) is neither byte-level nor with a fallback to bytes")
    byte_of = {character: byte for byte, character in _byte_level_alphabet().items()}
    added = backend.get_added_tokens_decoder()
    tokens = [b""] * vocab_size
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            continue
        if token_id in added:
            tokens[token_id] = b"" if added[token_id].special else text.encode()
        elif "ByteLevel" in kinds:
            tokens[token_id] = b"".join(_byte_level(character, byte_of) for character in text)
        else:
            byte = BYTE_TOKEN.fullmatch(text)
            tokens[token_id] = bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()
    return tokens


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that steer the model and are no text: chat roles, ends, padding."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}


def _state(decoder: Any) -> bytes:
    """A decoder of the Rust library as JSON."""
    return bytes(decoder.__getstate__())


def _decoder_kinds(state: dict[str, Any]) -> set[str]:
    kinds = {str(state["type"])}
    for part in state.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds


def _byte_level(character: str, byte_of: dict[str, int]) -> bytes:
    byte = byte_of.get(character)
    return character.encode() if byte is None else bytes([byte])


def _byte_level_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.

    Source: GPT-2's byte-level BPE, section 2.2 of "Language Models are Unsupervised Multitask Learners" (2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
