"""The header of a safetensors file: what is in it and where, without reading a tensor.

Layout: 8 bytes little-endian length of the header, the header (JSON, padded with spaces), then the tensors' bytes.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SafetensorsFileError(ValueError):
    """The file is no whole safetensors file; the message says why and does not name the file."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor that is stored or will be."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor inside a file; ``offset`` counts from the start of the file."""

    spec: TensorSpec
    offset: int


def read_header(path: Path) -> dict[str, TensorSlot]:
    """What a safetensors file holds; the file must be whole.

    Raises:
        SafetensorsFileError: too short, no valid header, an unknown type, or fewer or more bytes than the header says.
        OSError: the file cannot be opened.
    """
    size = path.stat().st_size
    if size < 8:
        raise SafetensorsFileError(f"it is only {size} bytes long")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise SafetensorsFileError(f"its header should have {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise SafetensorsFileError("its header is not JSON") from error
    if not isinstance(entries, dict):
        raise SafetensorsFileError("its header is not a JSON object")
    entries.pop("__metadata__", None)
    slots: dict[str, TensorSlot] = {}
    end = 0
    for name, entry in entries.items():
        slot, stop = _slot(name, entry, 8 + length)
        slots[name] = slot
        end = max(end, stop)
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "too long"
        raise SafetensorsFileError(f"it is {state}: {size} bytes, its header describes {8 + length + end}")
    return slots


def _slot(name: str, entry: Any, data_start: int) -> tuple[TensorSlot, int]:
    """One entry of the header as a slot, and the end of its bytes from the start of the data."""
    try:
        begin, stop = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        dtype_name = entry["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsFileError(f"its header entry of {name} is malformed") from error
    if dtype_name not in DTYPES:
        raise SafetensorsFileError(f"the type {dtype_name} of {name} is unknown; known are {', '.join(DTYPES)}")
    spec = TensorSpec(DTYPES[dtype_name], shape)
    if begin < 0 or stop - begin != spec.nbytes:
        raise SafetensorsFileError(f"{name} has {stop - begin} bytes where its shape and type need {spec.nbytes}")
    return TensorSlot(spec, data_start + begin), stop


def encode_header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, TensorSlot]]:
    """The first bytes of a file that will hold ``specs``, and where each tensor goes.

    Wide element types come first, so that every tensor is aligned to its own element size, as readers that map the
    file into memory need.
    """
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)  # stable: otherwise in the given order
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        spec = specs[name]
        entries[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    slots = {name: TensorSlot(specs[name], len(head) + entries[name]["data_offsets"][0]) for name in order}
    return head, slots
