"""The compiled bodies for CPUs: native/*.cpp, built once by g++ and kept in the user's cache folder.

Their interface is plain C, called by ctypes, so that a build needs no headers of torch and takes seconds. Threads are
those of the OpenMP library that torch has loaded: nothing is linked, its symbols are found in the process.

As with torch's own threads, a process must not fork once work has been shared among them: the child has none of them
and would wait for them for ever. Start processes that compute by spawning.
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
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SWITCH = "QUANTKIT_NATIVE"  # 0 in the environment: do without
SOURCES = Path(__file__).with_name("native")
# No -march=native: one file is right for all CPUs that share a cache folder and get past `native_blocker`.
FLAGS = ("-std=c++20", "-O2", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-fno-exceptions", "-fPIC")
MAX_SECONDS = 300  # for all files together
BUILD = "build-"  # how folders of builds begin
MAX_LIBRARIES = 4  # kept in the folder, the latest: several versions may share it


class NativeBuildError(Exception):
    """There is no library; the text says why, in one line."""


@cache
def native_library() -> ctypes.CDLL:
    """The library, built if it is not in the cache folder, or anew if what is there does not load.

    Raises:
        NativeBuildError: it cannot be had here.
    """
    reason = _blocker()
    if reason is not None:
        raise NativeBuildError(reason)
    try:
        library, is_new = _built()
        if not is_new:
            try:
                return ctypes.CDLL(str(library))
            except OSError as error:  # cut off, of another machine, or removed in this moment
                logger.warning("a library is built again, it does not load: %s", error)
                library.unlink(missing_ok=True)
                library, _ = _built()
        return ctypes.CDLL(str(library))
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


def _built() -> tuple[Path, bool]:
    """The file of the library, and whether this call built it; of processes that want it at the same time one does."""
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quantkit", "native")
    name = digest.hexdigest()[:32]
    library = _whole(folder, name)
    if library is not None:
        return library, False
    compiler = shutil.which("g++")
    if compiler is None:
        raise NativeBuildError("no compiled bodies: g++ is not on the path")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = _whole(folder, name)
        if library is not None:
            return library, False
        for left in folder.glob(f"{BUILD}*"):  # by a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        start = time.perf_counter()
        library = _compile(compiler, [source for source in sources if source.suffix == ".cpp"], folder, name)
        logger.warning("compiled %s in %.1f s", library, time.perf_counter() - start)
        oldest_first = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
        for old in oldest_first[:-MAX_LIBRARIES]:  # a process that has loaded it keeps it
            old.unlink()
    return library, True


def _whole(folder: Path, name: str) -> Path | None:
    """The library of this name whose content is the one that was built; others of the name are removed.

    To load a file that was cut off may end the process, and one of other functions fails at the first call.
    """
    for library in folder.glob(f"{name}-*.so"):
        try:
            if library == _named(folder, name, library.read_bytes()):
                return library
            logger.warning("a library is built again, its content is not what was built: %s", library)
            library.unlink()
        except FileNotFoundError:  # another process removed it
            continue
    return None


def _named(folder: Path, name: str, content: bytes) -> Path:
    return folder / f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _compile(compiler: str, sources: list[Path], folder: Path, name: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix=BUILD) as scratch:
        objects = [Path(scratch, source.name).with_suffix(".o") for source in sources]
        _run(
            [[compiler, *FLAGS, "-c", "-o", str(to), str(source)] for source, to in zip(sources, objects, strict=True)]
        )
        linked = Path(scratch, "linked.so")
        _run([[compiler, "-shared", "-o", str(linked), *map(str, objects), "-lm"]])
        with linked.open("rb+") as file:
            os.fsync(file.fileno())  # the name must not outlive the content if the machine stops
        return linked.replace(_named(folder, name, linked.read_bytes()))


def _run(commands: list[list[str]]) -> None:
    """All at the same time; none outlives the call."""
    deadline = time.monotonic() + MAX_SECONDS
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            processes.append(stack.enter_context(process))  # which waits for its end
            stack.callback(process.kill)
        try:
            for process in processes:
                output, _ = process.communicate(timeout=max(0, deadline - time.monotonic()))
                if process.returncode:
                    first = next((line for line in output.splitlines() if "error" in line), output.strip()[:200])
                    raise NativeBuildError(f"no compiled bodies: g++ says {first}")
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"no compiled bodies: g++ was not ready after {MAX_SECONDS} s") from error
