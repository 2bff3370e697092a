"""The folders of a run's checkpoints: one run at a time, filled beside, named at the end or not at all."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit_eval.file_lock import LOCK_NAME, try_lock

WORKING_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"
JOURNAL_NAME = "journal.json"

logger = logging.getLogger(__name__)


def working_folder(output: Path) -> Path:
    """Where a checkpoint grows until all is there."""
    return _beside(output, WORKING_SUFFIX)


def replaced_folder(output: Path) -> Path:
    """Where an older checkpoint waits until the new one has its name."""
    return _beside(output, REPLACED_SUFFIX)


def _beside(output: Path, suffix: str) -> Path:
    path = Path(os.path.abspath(output))  # `.` and `..` have no name of their own
    return path.parent / (path.name + suffix)


def put_back_replaced(output: Path) -> None:
    """Undo what a run that was killed while it replaced an output has left; see :func:`standing`."""
    old = standing(output)
    if old != output:
        os.replace(old, output)
        logger.warning("%s was put back; an earlier run was killed while it replaced it", output)


def standing(output: Path) -> Path:
    """Where what an output holds lies now: elsewhere only if a run was killed while it replaced it.

    Raises:
        CheckpointError: both are there, the output and what it replaced; only the user can say which may go.
    """
    old = replaced_folder(output)
    if not os.path.lexists(old):
        return output
    if os.path.lexists(output):
        raise CheckpointError(
            f"{old} is in the way; an earlier run was killed while it replaced {output}",
            fix=f"Delete {old} if {output} is what you want to keep",
        )
    return old


def check_working_folder(output: Path, *, writes: bool = True) -> None:
    """Refuse before the work what :func:`working_folders` would refuse after it. Makes nothing.

    Args:
        output: of the run.
        writes: the run follows, so that no other may be writing.

    Raises:
        CheckpointError: something else has the name of the working folder, or another run is writing in it.
    """
    folder = working_folder(output)
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(f"{folder} is in the way and is no folder", fix="Move it away")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / LOCK_NAME).exists():
        raise CheckpointError(f"{folder} is in the way and is no working folder of quantkit", fix="Move it away")
    if writes:
        with _lock(folder, output):
            pass


@contextmanager
def working_folders(outputs: Sequence[Path], *, keep: bool, work: str = JOURNAL_NAME) -> Iterator[list[Path]]:
    """The folders in which a run writes, locked. They are removed when it fails, or kept if the first holds work.

    Args:
        outputs: of the run.
        keep: whether finished work survives a failure.
        work: name of the file that says that there is some.

    Raises:
        CheckpointError: one cannot be made, is not ours, or another run is writing in it.
    """
    folders = [working_folder(output) for output in outputs]
    held: list[Path] = []
    with ExitStack() as locks:
        try:
            for output, folder in zip(outputs, folders, strict=True):
                locks.enter_context(_locked(folder, output))
                held.append(folder)
            if not (keep and (folders[0] / work).exists()):
                for folder in folders:
                    _clear(folder)  # what a killed run left behind
            yield folders
        except BaseException:
            if held and not (keep and (folders[0] / work).exists()):
                for folder in held:
                    shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path, output: Path) -> Iterator[None]:
    """Make the folder and hold it for this run; the system lets go of it when the process ends, however it ends."""
    check_working_folder(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror}") from error
    with _lock(folder, output):
        yield


@contextmanager
def _lock(folder: Path, output: Path) -> Iterator[None]:
    with ExitStack() as lock:
        try:
            is_held = lock.enter_context(try_lock(folder / LOCK_NAME))
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}: {error.strerror}") from error
        if not is_held:
            raise CheckpointError(f"another run is writing {output}", fix="Wait for it, or choose another path")
        yield


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_NAME:
            path.unlink()


def take_places(moves: Sequence[tuple[Path, Path]]) -> None:
    """Give finished folders and files their names, all of them or none; what they replace disappears only after that.

    Args:
        moves: (what is finished, its place).

    Raises:
        CheckpointError: one cannot be renamed; the places hold what they held.
    """
    done: list[tuple[Path, Path]] = []
    try:
        for made, place in moves:
            if place.exists():
                os.replace(place, replaced_folder(place))
            done.append((made, place))
            os.replace(made, place)
    except OSError as error:
        for made, place in reversed(done):
            if place.exists():
                os.replace(place, made)
            if replaced_folder(place).exists():
                os.replace(replaced_folder(place), place)
        raise CheckpointError(f"cannot rename {error.filename} to {error.filename2}: {error.strerror}") from error
    for _, place in moves:
        if place.is_dir():
            (place / LOCK_NAME).unlink(missing_ok=True)
        remove(replaced_folder(place))


def remove(path: Path) -> None:
    """Delete a folder with everything in it, or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
