"""llama.cpp's importance matrix: mean squares of input columns under GGUF names, as .gguf or as the older .dat.

Source: tools/imatrix of llama.cpp.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError, SourceError, UsageError
from quantkit.export_gguf.output_file import why
from quantkit.formats.gguf.header import GgufHeaderError, read_gguf_header

SUM, COUNT = ".in_sum2", ".counts"
_INT = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """What one was measured on, and what came out.

    Attributes:
        means: GGUF name -> [K], or [E, K] for experts: mean square of each input column; 0 where nothing was counted.
        datasets: names of the texts.
        chunks: windows of the calibration.
    """

    means: dict[str, Tensor]
    datasets: tuple[str, ...] = ()
    chunks: int = 0


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read an importance matrix in either format.

    Raises:
        SourceError: it cannot be read.
        UsageError: it is neither, or it is broken.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return _read_gguf(path) if is_gguf else _read_dat(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no importance matrix: {error}") from error


def _read_gguf(path: Path) -> ImportanceMatrix:
    try:
        header = read_gguf_header(path)
    except GgufHeaderError as error:
        raise ValueError(str(error)) from error
    if header.metadata.get("general.type") != "imatrix":
        raise ValueError("its general.type is not imatrix")
    data = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    means = {}
    for name, sums in data.items():
        if not name.endswith(SUM):
            continue
        counts = data.get(name.removesuffix(SUM) + COUNT)
        if counts is None:
            raise ValueError(f"{name} has no counts")
        count = counts.reshape(-1, 1)
        sums = sums.reshape(len(count), -1)
        mean = np.divide(sums, count, where=count > 0, out=np.zeros_like(sums))
        means[name.removesuffix(SUM)] = torch.from_numpy(mean if len(count) > 1 else mean[0])
    datasets = tuple(header.metadata.get("imatrix.datasets", ()))
    return ImportanceMatrix(means, datasets, int(header.metadata.get("imatrix.chunk_count", 0)))


def _read_dat(data: bytes) -> ImportanceMatrix:
    at = 0

    def integer() -> int:
        nonlocal at
        (value,) = _INT.unpack_from(data, at)
        at += _INT.size
        if not 0 <= value <= len(data):
            raise ValueError(f"the number {value} at byte {at - _INT.size} makes no sense")
        return int(value)

    def text() -> str:
        nonlocal at
        length = integer()
        value = data[at : at + length].decode("utf-8")
        at += length
        return value

    means: dict[str, Tensor] = {}
    for _ in range(integer()):
        name, calls, size = text(), integer(), integer()
        if at + 4 * size > len(data):
            raise ValueError("it ends too early")
        values = np.frombuffer(data, "<f4", size, at)
        at += 4 * size
        means[name] = torch.from_numpy(values / max(calls, 1)).float()
    if not means:
        raise ValueError("it has no entries")
    chunks = integer() if at < len(data) else 0
    return ImportanceMatrix(means, (text(),) if at < len(data) else (), chunks)


def write_imatrix(path: Path, matrix: ImportanceMatrix, *, chunk_tokens: int) -> None:
    """Write an importance matrix: the older format if the name ends with .dat, else GGUF.

    Args:
        path: of the file.
        matrix: what to write.
        chunk_tokens: tokens of a window.

    Raises:
        CheckpointError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".dat":
            partial.write_bytes(_dat_bytes(matrix.means, matrix.datasets, max(matrix.chunks, 1)))
        else:
            _write_gguf(partial, matrix, chunk_tokens)
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {why(error)}") from error
    finally:
        if partial.exists():
            partial.unlink()


def _dat_bytes(means: Mapping[str, Tensor], datasets: Sequence[str], chunks: int) -> bytes:
    def text(value: str) -> bytes:
        return _INT.pack(len(value.encode())) + value.encode()

    parts = [_INT.pack(len(means))]
    for name, mean in means.items():
        values = (mean.reshape(-1).float() * chunks).numpy().astype("<f4")
        parts += [text(name), _INT.pack(chunks), _INT.pack(values.size), values.tobytes()]
    return b"".join([*parts, _INT.pack(chunks), text(datasets[0] if datasets else "")])


def _write_gguf(path: Path, matrix: ImportanceMatrix, chunk_tokens: int) -> None:
    writer: Any = gguf.GGUFWriter(path, "imatrix")
    del writer.kv_data[0]["general.architecture"]  # an importance matrix has none
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(matrix.datasets) or [""])
    writer.add_uint32("imatrix.chunk_count", matrix.chunks)
    writer.add_uint32("imatrix.chunk_size", chunk_tokens)
    for name, mean in sorted(matrix.means.items()):
        rows = mean.reshape(-1, mean.shape[-1]).float().numpy()
        count = np.full((len(rows), 1), max(matrix.chunks, 1), np.float32)
        writer.add_tensor(name + SUM, rows * count)
        writer.add_tensor(name + COUNT, count)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
