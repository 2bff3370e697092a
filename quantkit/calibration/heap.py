"""Where the memory of finished activations goes."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt's parameter numbers in glibc's malloc.h
LARGE_BYTES = 1 << 20
LARGEST_BYTES = 32 << 20  # more, glibc does not take


def return_large_blocks() -> bool:
    """Have every freed block of 1 MiB or more go back to the system at once, for the rest of the process.

    Left alone, glibc raises its threshold to the largest block ever freed (up to 32 MiB): activations then come from a
    heap whose gaps are never returned, and a run holds several hundred megabytes that nobody uses.

    Returns:
        Whether this C library can; others keep their own ways.
    """
    can = _set(_M_MMAP_THRESHOLD, LARGE_BYTES) and _set(_M_TRIM_THRESHOLD, LARGE_BYTES)
    if can:
        ctypes.CDLL(None).malloc_trim(0)
    return can


@contextmanager
def large_blocks_kept() -> Iterator[None]:
    """Have freed blocks of up to 32 MiB stay with the process in the meantime, and be used again.

    For work that asks for the same blocks at every step: to have their pages cleared anew takes a quarter of its time.
    """
    _set(_M_MMAP_THRESHOLD, LARGEST_BYTES)
    _set(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        return_large_blocks()


def _set(parameter: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))
