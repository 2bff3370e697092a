"""scripts/gpu_check: it sees a wrong kernel, says what it saw, and runs to its end where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from gpu_check_parts import check_ops, document
from gpu_check_parts.case import Case, Work, error_of
from gpu_check_parts.isolation import UNFINISHED, Records, run_to_its_end
from gpu_check_parts.timing import Budget
from quantkit_kernels.launches import Launch

ROOT = Path(__file__).resolve().parent.parent


def launch(**values: Any) -> Launch:
    made = object.__new__(Launch)
    for name, value in {"op": "rms_norm", "bytes": 4_800_000, "flops": 0, "flop_dtype": "bf16", **values}.items():
        object.__setattr__(made, name, value)
    return made


def test_the_error_is_that_of_the_worst_result() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert error_of(wanted, wanted, None) == (0.0, 1e-5)
    assert error_of(wanted + torch.tensor([0.0, 0.4]), wanted, 0.01) == (pytest.approx(0.1), 0.01)
    pair = (wanted.bfloat16(), torch.tensor([1, 2]))
    assert error_of(pair, (wanted.bfloat16(), torch.tensor([1, 3])), None) == (0.5, 0.0)
    error, _ = error_of(torch.tensor([float("nan"), 1.0]), wanted, None)
    assert error == float("inf")


def test_what_is_wrong_fails_or_has_no_time_is_said() -> None:
    good = torch.ones(3)

    def broken(device: torch.device) -> Work:
        raise RuntimeError("no\nregisters")

    cases = [
        Case("rms_norm", "right", lambda device: Work(lambda: good, lambda: good, launch(), torch_run=lambda: None)),
        Case("rms_norm", "wrong", lambda device: Work(lambda: good, lambda: good + 1, launch())),
        Case("rms_norm", "broken", broken),
    ]
    said: list[str] = []
    cpu = torch.device("cpu")
    right, wrong, failed = check_ops.check_ops(cases, cpu, lambda function: 2.0, Budget(60), said.append)
    assert (right["passed"], right["roofline_fraction"], right["times_torch"]) == (True, 0.5, 1.0)
    assert (wrong["passed"], wrong["error"]) == (False, 0.5)
    assert failed["failed"] == "RuntimeError: no registers"
    assert [word in line for word, line in zip(("1.00 x torch", "WRONG", "FAILED"), said, strict=True)] == [True] * 3
    (late,) = check_ops.check_ops(cases[:1], cpu, lambda function: 2.0, Budget(-1), said.append)
    assert "skipped" in late


def test_a_context_that_is_broken_ends_the_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The case behind the broken one is not tried in this process."""

    def dead(device: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    good = torch.ones(3)
    cases = [Case("rms_norm", name, lambda device: Work(lambda: good, lambda: good, launch())) for name in "ab"]
    records = Records(tmp_path / "records.json")
    with pytest.raises(check_ops.BrokenContextError, match="after rms_norm: a: RuntimeError: an illegal memory"):
        check_ops.check_ops(cases, torch.device("cuda"), lambda function: 2.0, Budget(60), lambda line: None, records)
    assert [record["case"] for record in json.loads((tmp_path / "records.json").read_text())] == ["a"]


PART = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
for name, kind in (("--records", str), ("--from", int), ("--seconds", float)):
    parser.add_argument(name, type=kind, dest=name.strip("-") + "_")
own, records = parser.parse_args(), []
for number in range(own.from_, 5):
    records.append({"case": number, "failed": "the process ended here"})
    pathlib.Path(own.records_).write_text(json.dumps(records))
    if number == 1:
        os.abort()
    if number == 3:
        sys.exit("no memory")
    records[-1] = {"case": number}
    pathlib.Path(own.records_).write_text(json.dumps(records))
"""


def test_a_case_that_takes_the_process_with_it_stops_no_other() -> None:
    said: list[str] = []
    found = run_to_its_end("rows", [sys.executable, "-c", PART], 60, said.append)
    assert [record["case"] for record in found] == [0, 1, 2, 3, 4]
    assert [record.get("failed", "").split(":")[0] for record in found] == ["", "exit code -6", "", "exit code 1", ""]
    assert found[3]["failed"] == "exit code 1: no memory"
    assert UNFINISHED in PART
    assert len(said) == 2


def test_a_part_that_does_not_begin_or_does_not_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = run_to_its_end("rows", [sys.executable, "-c", "raise SystemExit('no triton')"], 60, lambda line: None)
    assert found["failed"] == "exit code 1: no triton"
    assert document.is_wrong(found)
    monkeypatch.setattr("gpu_check_parts.isolation.GRACE_SECONDS", 0.5)
    (found,) = run_to_its_end("rows", [sys.executable, "-c", "import time; time.sleep(60)"], 0, lambda line: None)
    assert found["failed"] == "no end after 0 s"


def report() -> dict[str, Any]:
    op = {"error": 0.001, "allowed": 0.01, "passed": True, "microseconds": 10.0}
    found: dict[str, Any] = {
        "machine": {"device": "a GPU", "torch": "2", "triton": "3", "quantkit": "0"},
        "ops": [
            {"op": "paged_attention", "case": "decode, 32 sequences of 4096", "roofline_fraction": 0.75, **op},
            {"op": "w4a16_gemm", "case": "llama o_proj, M=1, g", "roofline_fraction": 0.5, "times_torch": 3.5, **op},
            {"op": "w4a16_gemm", "case": "llama o_proj, M=16, g", "roofline_fraction": 0.5, "times_torch": 2.5, **op},
            {"op": "w8a8_gemm", "case": "llama, M=2048", "skipped": "no time"},
        ],
        "engine": [
            {"weights": "bf16", "batch": 1, "tokens_per_second": 900.0, "milliseconds_per_step": 1.1,
             "roofline_fraction": 0.61},
            {"weights": "bf16", "compare": "CPU", "kl_nats": 0.001, "passed": True},
        ],
    }  # fmt: skip
    found["aims"] = document.aims(found)
    return found


def test_aims_are_judged_by_the_least() -> None:
    assert [(row["least"], row["is_met"]) for row in report()["aims"]] == [
        (0.75, True), (2.5, False), (None, None), (0.61, True)
    ]  # fmt: skip


def test_the_page_gets_one_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "KERNELS.md"
    page.write_text("# Kernels\n\ntext\n")
    monkeypatch.setattr(document, "PAGE", page)
    document.write_page(report())
    first = page.read_text()
    document.write_page(report())
    assert page.read_text() == first
    assert first.startswith("# Kernels\n\ntext\n\n## Measured on a GPU\n")
    assert "| W4A16 at M <= 16, times torch's bfloat16 | 3.0 | 2.50 | no |" in first
    assert "| w8a8_gemm | llama, M=2048 | no time |" in first


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the dry run is for machines without a GPU")
def test_the_dry_run_ends(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--dry-run", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"w4a16_gemm", "paged_attention", "sample_tokens", "gptq_columns"} <= {op["op"] for op in found["ops"]}
    assert all(0 <= op["error"] <= op["allowed"] for op in found["ops"])
    assert [record["batch"] for record in found["engine"]] == [1, 2] * 3
    assert not any(document.is_wrong(record) or "skipped" in record for record in found["ops"] + found["engine"])
    assert "0 of " in done.stdout
    assert "| W8A8 | 2 |" in done.stdout
