"""Free memory of the machine and of its container."""

from pathlib import Path

import pytest

from quantkit.serve import memory


def write_cgroup(folder: Path, limit: str, used: int = 0, cache: int = 0) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:    500 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    assert memory.available_bytes() == 500 * 1024
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    write_cgroup(tmp_path, "max")
    assert memory.available_bytes() == 500 * 1024
    write_cgroup(tmp_path, "100000", used=60000, cache=20000)
    assert memory.available_bytes() == 60000  # pages of files can be dropped
    write_cgroup(tmp_path, "1000", used=5000)
    assert memory.available_bytes() == 0


def test_this_machine_has_some() -> None:
    assert memory.available_bytes() > 1 << 20


def test_without_proc_half_of_the_machine_is_taken_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    assert memory.available_bytes() > 1 << 20
