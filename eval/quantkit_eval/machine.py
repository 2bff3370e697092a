"""Where and with what something was measured: the ``machine`` of a record."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("quantkit", "torch", "transformers", "triton", "numpy", "scipy", "lm_eval")


@cache
def _facts() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": _cpu_count(),
        "memory_bytes": _memory_bytes(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def describe_machine() -> dict[str, Any]:
    """Processor, memory, accelerator, torch's threads and the versions of what takes part; null where unknown."""
    return {**_facts(), "num_threads": torch.get_num_threads()}


def _cpu_model() -> str:
    """Linux names the processor in /proc/cpuinfo; elsewhere the architecture has to do."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
