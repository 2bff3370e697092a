"""Where the memory of finished activations goes."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt's parameter numbers in glibc's malloc.h
LARGE_BYTES = 1 << 20
LARGEST_BYTES = 32 << 20  # more, glibc does not take

_RETURNED = LARGE_BYTES, LARGE_BYTES  # thresholds from which blocks are asked of the system, and gaps given back to it
_KEPT = LARGEST_BYTES, 2**31 - 1
# What glibc arrives at when it is left alone and a block of the largest size is freed.
_LEFT_ALONE = LARGEST_BYTES, 2 * LARGEST_BYTES
_now = _LEFT_ALONE


def return_large_blocks() -> bool:
    """Have every freed block of 1 MiB or more go back to the system at once, for the rest of the process.

    Left alone, glibc raises its threshold to the largest block ever freed (up to 32 MiB): activations then come from a
    heap whose gaps are never returned, and a run holds several hundred megabytes that nobody uses.

    Returns:
        Whether this C library can; others keep their own ways.
    """
    return _set(_RETURNED)


@contextmanager
def large_blocks_kept() -> Iterator[bool]:
    """Have freed blocks of up to 32 MiB stay with the process in the meantime, and be used again.

    For work that asks for the same blocks at every step: to have their pages cleared anew takes a quarter of its time.
    Afterwards it is as before, so that uses may be nested; not for several threads.

    Yields:
        Whether this C library can; others keep their own ways.
    """
    before = _now
    can = _set(_KEPT)
    try:
        yield can
    finally:
        if can:
            _set(before)


def _set(thresholds: tuple[int, int]) -> bool:
    """Set both, and give back what lies above them; whether this C library can."""
    global _now
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is None or not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return False
    large, gap = thresholds
    if not (library.mallopt(_M_MMAP_THRESHOLD, large) and library.mallopt(_M_TRIM_THRESHOLD, gap)):
        return False
    if thresholds == _RETURNED:
        library.malloc_trim(0)
    _now = thresholds
    return True
