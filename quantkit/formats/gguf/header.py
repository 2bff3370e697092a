"""The header of a GGUF file: metadata and the table of tensors, without reading a weight.

Layout, little-endian: "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries; each entry a string
key, u32 type, value; each tensor a string name, u32 number of dimensions, u64 dimensions (fastest first), u32 type,
u64 offset from the start of the data, which begins at the next multiple of general.alignment.

Source: ggml, docs/gguf.md (the specification of the format).
"""

import math
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

DEFAULT_ALIGNMENT = 32
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class GgufHeaderError(ValueError):
    """The file is no whole GGUF file; the message says why and does not name the file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the table of tensors.

    Attributes:
        name: llama.cpp's name, such as ``blk.0.attn_q.weight``.
        type_name: such as ``F32`` or ``Q4_K``.
        shape: dimensions as stored, fastest first: [K, N] for a weight of N rows.
        nbytes: stored bytes.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        version: of the format.
        metadata: every entry; arrays as tuples.
        tensors: in file order.
        data_end: bytes up to the end of the last tensor.
        alignment: of tensors; what follows the last one fills up to it.
    """

    version: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data_end: int
    alignment: int


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        if count > len(self.data) - self.at:  # each value takes at least a byte
            raise GgufHeaderError("it ends inside its header")
        form = f"<{count}{code}"
        size = struct.calcsize(form)
        if self.at + size > len(self.data):
            raise GgufHeaderError("it ends inside its header")
        values = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        if self.at + length > len(self.data):
            raise GgufHeaderError("it ends inside its header")
        text = self.data[self.at : self.at + length]
        self.at += length
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            (item_kind,) = self.take("I")
            (count,) = self.take("Q")
            if item_kind in SCALARS:
                return self.take(SCALARS[item_kind], count)
            return tuple(self.value(item_kind) for _ in range(count))
        if kind not in SCALARS:
            raise GgufHeaderError(f"its header has a value of the unknown type {kind}")
        return self.take(SCALARS[kind])[0]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file; the file must be whole.

    Raises:
        GgufHeaderError: no GGUF, an unknown version or type, or fewer bytes than its table of tensors says.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise GgufHeaderError(f"it is only {path.stat().st_size} bytes long")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _parse(_Cursor(data), len(data))


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    magic = bytes(cursor.take("B", 4))
    if magic != b"GGUF":
        raise GgufHeaderError(f"it begins with {magic!r} instead of b'GGUF'")
    (version,) = cursor.take("I")
    if version not in VERSIONS:
        raise GgufHeaderError(f"its format version is {version}; known are {', '.join(map(str, VERSIONS))}")
    num_tensors, num_entries = cursor.take("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        (kind,) = cursor.take("I")
        metadata[key] = cursor.value(kind)
    tensors: list[GgufTensor] = []
    end = 0
    for _ in range(num_tensors):
        tensor, offset = _tensor(cursor)
        tensors.append(tensor)
        end = max(end, offset + tensor.nbytes)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise GgufHeaderError(f"its general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    if start + end > size:
        raise GgufHeaderError(f"it is truncated: {size} bytes, its header describes {start + end}")
    return GgufHeader(version, metadata, tuple(tensors), start + end, alignment)


def _tensor(cursor: _Cursor) -> tuple[GgufTensor, int]:
    """One entry of the table, and the offset of its bytes from the start of the data."""
    name = cursor.string()
    (num_dimensions,) = cursor.take("I")
    shape = cursor.take("Q", num_dimensions)
    kind, offset = cursor.take("IQ")
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError as error:
        raise GgufHeaderError(f"the tensor {name} has the unknown type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    return GgufTensor(name, quantization.name, shape, math.prod(shape) // block * block_bytes), offset
