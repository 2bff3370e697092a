"""Write the safetensors files of a checkpoint: laid out before the work, filled as layers finish, named at the end."""

import errno
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.safetensors_file import DTYPE_NAMES, TensorSlot, TensorSpec, encode_header

PARTIAL_SUFFIX = ".partial"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
COPY_CHUNK_BYTES = 1 << 24


def plan_shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[str]]:
    """Which tensors go into which file: in the given order, a new file when the next tensor would not fit.

    Returns:
        file name -> tensor names; ``model.safetensors`` alone if all fit into one file.

    Raises:
        ValueError: max_shard_bytes is not positive.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be positive")
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


class ShardWriter:
    """Writes tensors at their final offsets, in any order, into files that get their names only when all is there.

    The space is reserved at once, so that a full disk shows before the work and not after it. Until ``finish`` the
    files end in ``.partial``; ``abort`` removes them, ``close`` leaves them for ``resume``. As a context manager the
    writer aborts unless ``finish`` was called.

    Args:
        folder: exists or is made; must not hold model weights yet.
        specs: every tensor of the checkpoint, in the order in which they should lie.
        max_shard_bytes: a file holds no more tensor bytes than this, unless one tensor alone is larger.

    Raises:
        CheckpointError: the disk is too small, or the folder cannot be written.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._prepare(folder, specs, max_shard_bytes)
        self._written: set[str] = set()
        self._made_folder = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._reserve()
        except OSError as error:
            self.abort()
            raise self._cannot_write(error) from error

    @classmethod
    def resume(
        cls,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        written: Collection[str],
    ) -> "ShardWriter":
        """Open the temporary files of an interrupted writer again.

        Args:
            folder: as given to the interrupted writer.
            specs: the same.
            max_shard_bytes: the same.
            written: tensors that are known to be in the files (after ``flush``); they need not be written again.

        Raises:
            CheckpointError: the temporary files are missing or were laid out for other tensors.
        """
        writer = cls.__new__(cls)
        writer._prepare(folder, specs, max_shard_bytes)
        unknown = set(written) - specs.keys()
        if unknown:
            raise CheckpointError(f"cannot resume: {min(unknown)} is no tensor of this checkpoint")
        writer._written = set(written)
        for file_name, head in writer._heads.items():
            path = writer._partial(file_name)
            if not path.exists() and (folder / file_name).is_file():  # it was stopped while it gave the names
                os.replace(folder / file_name, path)
            if not path.is_file() or path.stat().st_size != writer._sizes[file_name]:
                writer.close()
                raise CheckpointError(f"cannot resume: {path} is missing or has another size", fix="Start afresh")
            writer._files[file_name] = os.open(path, os.O_RDWR)
            if os.pread(writer._files[file_name], len(head), 0) != head:
                writer.close()
                raise CheckpointError(f"cannot resume: {path} was laid out for other tensors", fix="Start afresh")
        return writer

    def _prepare(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> None:
        self.folder = folder
        self._made_folder = False
        self._slots: dict[str, tuple[str, TensorSlot]] = {}
        self._heads: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._files: dict[str, int] = {}  # file name -> descriptor of its temporary file
        for file_name, names in plan_shards(specs, max_shard_bytes).items():
            head, slots = encode_header({name: specs[name] for name in names})
            self._heads[file_name] = head
            self._sizes[file_name] = len(head) + sum(specs[name].nbytes for name in names)
            self._slots |= {name: (file_name, slot) for name, slot in slots.items()}

    def _partial(self, file_name: str) -> Path:
        return self.folder / (file_name + PARTIAL_SUFFIX)

    def _reserve(self) -> None:
        """Make the temporary files at their full size."""
        for file_name in self._sizes:
            self._files[file_name] = os.open(self._partial(file_name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < sum(self._sizes.values()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for file_name, size in self._sizes.items():
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._files[file_name], 0, size)
            else:  # macOS: the space is not reserved, but it was there a moment ago
                os.truncate(self._files[file_name], size)
            os.pwrite(self._files[file_name], self._heads[file_name], 0)

    def _cannot_write(self, error: OSError) -> CheckpointError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            need = sum(self._sizes.values())
            parent = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
            free = shutil.disk_usage(parent).free
            return CheckpointError(
                f"no space for the checkpoint in {self.folder}: it needs {need:,} bytes, {free:,} are free",
                fix="Free some space or choose another output folder",
            )
        return CheckpointError(f"cannot write the checkpoint in {self.folder}: {error.strerror}")

    @property
    def total_bytes(self) -> int:
        """Size of all files together, headers included."""
        return sum(self._sizes.values())

    @property
    def missing(self) -> list[str]:
        """Tensors that are not written yet, in order."""
        return [name for name in self._slots if name not in self._written]

    def _claim(self, name: str, spec: TensorSpec) -> tuple[int, int]:
        """Descriptor and offset for a tensor that was planned so and is not written yet."""
        if name not in self._slots:
            raise CheckpointError(f"{name} was not planned for this checkpoint")
        file_name, slot = self._slots[name]
        if spec != slot.spec:
            raise CheckpointError(
                f"{name} has {DTYPE_NAMES.get(spec.dtype, spec.dtype)} {list(spec.shape)}, "
                f"planned was {DTYPE_NAMES[slot.spec.dtype]} {list(slot.spec.shape)}"
            )
        if name in self._written:
            raise CheckpointError(f"{name} was written already")
        return self._files[file_name], slot.offset

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor.

        Raises:
            CheckpointError: not planned, another type or shape than planned, no data (meta), or written already.
        """
        if tensor.is_meta:
            raise CheckpointError(f"{name} has no data (it is on the meta device)")
        file, offset = self._claim(name, TensorSpec(tensor.dtype, tuple(tensor.shape)))
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        try:
            _write_at(file, flat.numpy().data, offset)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._written.add(name)

    def read(self, name: str) -> Tensor:
        """A tensor that is written already.

        Raises:
            CheckpointError: it is not.
        """
        if name not in self._written:
            raise CheckpointError(f"{name} is not written yet")
        file_name, slot = self._slots[name]
        data = bytearray(os.pread(self._files[file_name], slot.spec.nbytes, slot.offset))
        if len(data) != slot.spec.nbytes:
            raise CheckpointError(f"{self._partial(file_name)} ended while {name} was read")
        return torch.frombuffer(data, dtype=slot.spec.dtype).reshape(slot.spec.shape)

    def rewrite(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the same type and shape over one that is written already.

        Raises:
            CheckpointError: as ``write``, but it must have been written.
        """
        if name not in self._written:
            raise CheckpointError(f"{name} is not written yet")
        self._written.remove(name)
        self.write(name, tensor)

    def copy(self, name: str, path: Path, slot: TensorSlot) -> None:
        """Copy a tensor's bytes from another file, untouched.

        Args:
            name: the tensor's name here.
            path: file that holds it.
            slot: where it lies there.

        Raises:
            CheckpointError: as ``write``, or the other file ends early.
        """
        file, offset = self._claim(name, slot.spec)
        try:
            with path.open("rb") as source:
                source.seek(slot.offset)
                left = slot.spec.nbytes
                while left:
                    chunk = source.read(min(left, COPY_CHUNK_BYTES))
                    if not chunk:
                        raise CheckpointError(f"{path} ended while {name} was copied")
                    _write_at(file, memoryview(chunk), offset)
                    offset += len(chunk)
                    left -= len(chunk)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._written.add(name)

    def flush(self) -> None:
        """Bring everything written so far to the disk; after it a journal may say so."""
        for file in self._files.values():
            os.fsync(file)

    def finish(self) -> list[Path]:
        """Give the files their names, once everything is on the disk.

        Returns:
            The weight files, and the index last if there is more than one.

        Raises:
            CheckpointError: a tensor was not written; the temporary files stay.
        """
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise CheckpointError(f"{self.missing[0]}{more} was never written")
        self.flush()
        self.close()
        for file_name in self._sizes:
            os.replace(self._partial(file_name), self.folder / file_name)
        finished = [self.folder / file_name for file_name in self._sizes]
        if len(finished) > 1:
            index = {
                "metadata": {"total_size": sum(slot.spec.nbytes for _, slot in self._slots.values())},
                "weight_map": {name: self._slots[name][0] for name in sorted(self._slots)},
            }
            finished.append(write_text_durably(self.folder / INDEX_NAME, json.dumps(index, indent=2) + "\n"))
        _sync_folder(self.folder)
        return finished

    def close(self) -> None:
        """Close the files; the temporary ones stay, for ``resume``."""
        while self._files:
            os.close(self._files.popitem()[1])

    def abort(self) -> None:
        """Remove the temporary files, and the folder if this writer made it and nothing else is in it."""
        self.close()
        if not self.folder.is_dir():
            return
        for file_name in self._sizes:
            self._partial(file_name).unlink(missing_ok=True)
        if self._made_folder and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()  # after finish there is nothing left to remove


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the system may take less than asked in one call."""
    while data:
        count = os.pwrite(file, data, offset)
        data = data[count:]
        offset += count


def write_text_durably(path: Path, text: str) -> Path:
    """Write a file so that it is whole or absent under its name, even if the machine stops."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
