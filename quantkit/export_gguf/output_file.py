"""The file while it is written: under a temporary name until it is whole, in parts if it is to be split."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from gguf import GGUFWriter

from quantkit.errors import CheckpointError, UsageError

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})")


@contextmanager
def open_output(path: Path, arch: str, *, split_bytes: int = 0, overwrite: bool = False) -> Iterator[GGUFWriter]:
    """A writer whose file appears at ``path`` when the block ends without an error, and not at all otherwise.

    Args:
        path: ends with .gguf; parts of a split file are called NAME-00001-of-00003.gguf.
        arch: llama.cpp's architecture.
        split_bytes: largest size of a part; 0 for one file.
        overwrite: replace files that are there.

    Raises:
        UsageError: the name is no .gguf, or something is there already.
        CheckpointError: the disk is full or the folder cannot be written.
    """
    if path.suffix != ".gguf":
        raise UsageError(f"{path.name} does not end with .gguf")
    if not overwrite and (path.exists() or parts_of(path)):
        raise UsageError(f"{path} exists", fix="Choose another name, or --overwrite")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write into {path.parent}: {error.strerror}") from error
    writer = GGUFWriter(folder / path.name, arch, split_max_size=split_bytes)
    try:
        yield writer
        writer.close()
        _take_places(folder, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)


def _take_places(folder: Path, path: Path) -> None:
    for old in (path, *parts_of(path)):
        old.unlink(missing_ok=True)
    for part in sorted(folder.iterdir()):
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.rename(path.parent / part.name)


def written_files(path: Path) -> list[Path]:
    """The file, or its parts in order."""
    return [path] if path.exists() else parts_of(path)


def all_parts(path: Path) -> list[Path]:
    """All parts of the file of which ``path`` is one, in order; the file itself if it is whole."""
    match = _PART.fullmatch(path.stem)
    return sorted(path.parent.glob(f"{escape(match[1])}-*-of-{match[2]}.gguf")) if match else [path]


def parts_of(path: Path) -> list[Path]:
    """The parts of a split file that are there, in order."""
    number = "[0-9]" * 5
    return sorted(path.parent.glob(f"{escape(path.stem)}-{number}-of-{number}.gguf"))
