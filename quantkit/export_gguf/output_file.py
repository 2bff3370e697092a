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

from quantkit.checkpoint.manifest import manifest_path
from quantkit.errors import CheckpointError, UsageError

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})")


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that `open_output` would refuse, before there is anything to write.

    Raises:
        UsageError: the name is no .gguf, or something is there already.
    """
    if path.suffix != ".gguf":
        raise UsageError(f"{path.name} does not end with .gguf", fix=f"Call it {path.stem}.gguf")
    there = [place for place in (path, *parts_of(path), manifest_path(path)) if place.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} exists", fix="Choose another name, or --overwrite")


@contextmanager
def open_output(
    path: Path, arch: str, *, split_bytes: int = 0, overwrite: bool = False
) -> Iterator[tuple[GGUFWriter, Path]]:
    """A writer and the folder it writes into, whose files appear beside ``path`` when the block ends without an error.

    Args:
        path: ends with .gguf; parts of a split file are called NAME-00001-of-00003.gguf.
        arch: llama.cpp's architecture.
        split_bytes: largest size of a part; 0 for one file.
        overwrite: replace files that are there.

    Yields:
        The writer, and its folder, into which more files can be put; nothing is left of it if there is an error.

    Raises:
        UsageError: the name is no .gguf, or something is there already.
        CheckpointError: the disk is full or the folder cannot be written.
    """
    check_output(path, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write into {path.parent}: {error.strerror}") from error
    writer = GGUFWriter(folder / path.name, arch, split_max_size=split_bytes)
    try:
        yield writer, folder
        writer.close()
        _take_places(folder, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {why(error)}") from error
    finally:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)


def why(error: OSError) -> str:
    """What went wrong when a file was written; numpy, which writes tensors, only counts what it got rid of."""
    return error.strerror or f"the disk is full, or files may not grow so large ({error})"


def _take_places(folder: Path, path: Path) -> None:
    """Move what was made to where it belongs, and remove what it takes the place of."""
    made = sorted(folder.iterdir())
    for file in made:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    old = {path, *parts_of(path)} - {path.parent / file.name for file in made}
    manifest_path(path).unlink(missing_ok=True)  # it would name hashes of what is replaced now
    for file in made:
        file.replace(path.parent / file.name)
    for file in old:
        file.unlink(missing_ok=True)


def written_files(path: Path) -> list[Path]:
    """The file, or its parts in order."""
    return [path] if path.exists() else parts_of(path)


def all_parts(path: Path) -> list[Path]:
    """All parts of the file of which ``path`` is one, in order; the file itself if it is whole."""
    match = _PART.fullmatch(path.stem)
    return sorted(path.parent.glob(f"{escape(match[1])}-*-of-{match[2]}.gguf")) if match else [path]


def asked_name(path: Path) -> Path:
    """The name that a file was asked for: NAME.gguf for its part NAME-00001-of-00003.gguf."""
    match = _PART.fullmatch(path.stem)
    return path.with_name(f"{match[1]}.gguf") if match else path


def parts_of(path: Path) -> list[Path]:
    """The parts of a split file that are there, in order."""
    number = "[0-9]" * 5
    return sorted(path.parent.glob(f"{escape(path.stem)}-{number}-of-{number}.gguf"))
