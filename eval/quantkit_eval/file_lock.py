"""One writer at a time: a lock on a file, which the system lets go of when the process ends, however it ends."""

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from quantkit_eval.errors import RecordError

LOCK_NAME = ".lock"

logger = logging.getLogger(__name__)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold a file, which is made if need be, while the block runs; False if another process holds it.

    Where files cannot be locked a warning says so, and the block runs as if it were held.

    Raises:
        OSError: the file cannot be opened.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _take(lock, path)
    finally:
        os.close(lock)


@contextmanager
def hold_records(folder: Path, *, fix: str = "Wait for it, or name another folder") -> Iterator[None]:
    """Make a folder of records and hold it while the block runs.

    At the end the lock goes, and of the folder and its parents what was made here and is empty.

    Args:
        folder: of the records.
        fix: what to do if another process holds it.

    Raises:
        RecordError: another process holds it, or it cannot be made or written to.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_held = stack.enter_context(try_lock(folder / LOCK_NAME))
        except OSError as error:
            raise RecordError(f"{folder}: cannot be written ({error.strerror})", fix="Name another folder") from error
        if not is_held:
            raise RecordError(f"{folder}: another run or evaluation is writing its records there", fix=fix)
        stack.callback((folder / LOCK_NAME).unlink, missing_ok=True)
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty, or never made
            folder.rmdir()


def _take(lock: int, path: Path) -> bool:
    """Whether this process holds the lock now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be locked (%s); see to it that nobody else writes there", path, error.strerror)
    # the other process may have finished meanwhile and taken the folder, and this lock with it, elsewhere
    return path.exists() and os.path.samestat(os.fstat(lock), path.stat())
