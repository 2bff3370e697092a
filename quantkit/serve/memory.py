"""How much memory is free, for a cache that should leave some."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that this process can take without swapping: of the machine, or of its container if that has less."""
    return min(_machine_bytes(), _container_bytes())


def _machine_bytes() -> int:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS does not say what is free


def _container_bytes() -> int:
    """What the control group still allows; a very large number if it sets no limit."""
    unlimited = 1 << 62
    limit, used = _read_number(CGROUP / "memory.max"), _read_number(CGROUP / "memory.current")
    if limit is None or used is None:
        return unlimited
    cache = 0
    stat = CGROUP / "memory.stat"
    if stat.is_file():  # pages of files are counted as used and can be dropped
        cache = sum(int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file "))
    return max(0, limit - used + cache)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
