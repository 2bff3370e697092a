"""Where the memory of finished activations goes."""

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # mallopt's parameter number in glibc's malloc.h
LARGE_BYTES = 1 << 20


def return_large_blocks() -> bool:
    """Have every freed block of 1 MiB or more go back to the system at once, for the rest of the process.

    Left alone, glibc raises its threshold to the largest block ever freed (up to 32 MiB): activations then come from a
    heap whose gaps are never returned, and a run holds several hundred megabytes that nobody uses.

    Returns:
        Whether this C library can; others keep their own ways.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
