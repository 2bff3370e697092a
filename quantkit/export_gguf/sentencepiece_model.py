"""The scores in a SentencePiece model file, read from its protocol buffer.

Source: sentencepiece_model.proto (numbers of the fields) and the encoding of protocol buffers.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from quantkit.errors import UsageError

NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PIECES, _TEXT, _SCORE = 1, 1, 2  # fields of the model, and of a piece
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_scores(folder: Path) -> dict[str, float] | None:
    """Piece -> score (of a BPE: minus the rank of its merge) by the model file of a folder; None if it has none.

    Raises:
        UsageError: the file is broken.
    """
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        fields = _fields(path.read_bytes())
        return dict(_piece(value) for number, value in fields if number == _PIECES and isinstance(value, bytes))
    except (IndexError, ValueError, struct.error) as error:
        raise UsageError(f"{path} is no SentencePiece model", fix="Copy it again from where the model came") from error


def _piece(message: bytes) -> tuple[str, float]:
    fields = dict(_fields(message))
    text, score = fields.get(_TEXT, b""), fields.get(_SCORE, bytes(4))
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece is text and a number")
    return text.decode(), float(struct.unpack("<f", score)[0])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message; numbers of four or eight bytes stay bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if key & 7 == _BYTES:
            size, at = _varint(message, at)
        elif key & 7 in (_FIXED32, _FIXED64):
            size = 4 if key & 7 == _FIXED32 else 8
        else:
            raise ValueError(f"there is no wire type {key & 7}")
        if at + size > len(message):
            raise ValueError("it is truncated")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
