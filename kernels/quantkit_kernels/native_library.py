"""The compiled bodies for CPUs: native/*.cpp, built once by g++ and kept in the user's cache folder.

Their interface is plain C, called by ctypes, so that a build needs no headers of torch and takes seconds. Threads are
those of the OpenMP library that torch has loaded: nothing is linked, its symbols are found in the process.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SWITCH = "QUANTKIT_NATIVE"  # 0 in the environment: do without
SOURCES = Path(__file__).with_name("native")
# No -march=native: one file is right for all CPUs that share a cache folder and get past `native_blocker`.
FLAGS = ("-std=c++20", "-O2", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-fno-exceptions", "-fPIC")
MAX_SECONDS = 300


class NativeBuildError(Exception):
    """There is no library; the text says why, in one line."""


@cache
def native_library() -> ctypes.CDLL:
    """The library, built if it is not in the cache folder.

    Raises:
        NativeBuildError: it cannot be had here.
    """
    reason = _blocker()
    if reason is not None:
        raise NativeBuildError(reason)
    try:
        return ctypes.CDLL(str(_built()))
    except OSError as error:  # a folder that cannot be written, a library that does not load
        raise NativeBuildError(f"no compiled bodies: {error}") from error


@cache
def native_blocker() -> str | None:
    """Why there are no compiled bodies here; None if there are. Builds them when first asked."""
    try:
        native_library()
    except NativeBuildError as error:
        return str(error)
    return None


def _blocker() -> str | None:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if platform.system() != "Linux":
        return f"compiled bodies are for Linux, this is {platform.system()}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return f"compiled bodies are for CPUs with AVX2, this has {torch.backends.cpu.get_cpu_capability()}"
    return None


def _built() -> Path:
    """The file of the library; processes that want it at the same time build it once."""
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quantkit", "native")
    library = folder / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise NativeBuildError("no compiled bodies: g++ is not on the path")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            start = time.perf_counter()
            _compile(compiler, [source for source in sources if source.suffix == ".cpp"], library)
            logger.warning("compiled %s in %.1f s", library, time.perf_counter() - start)
    return library


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder, source.name).with_suffix(".o") for source in sources]
        _run(
            [[compiler, *FLAGS, "-c", "-o", str(to), str(source)] for source, to in zip(sources, objects, strict=True)]
        )
        linked = Path(folder, "linked.so")
        _run([[compiler, "-shared", "-o", str(linked), *map(str, objects), "-lm"]])
        linked.replace(library)


def _run(commands: list[list[str]]) -> None:
    """All at the same time."""
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) for command in commands]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=MAX_SECONDS)
            if process.returncode:
                first = next((line for line in output.splitlines() if "error" in line), output.strip()[:200])
                raise NativeBuildError(f"no compiled bodies: g++ says {first}")
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"no compiled bodies: g++ was not ready after {MAX_SECONDS} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
