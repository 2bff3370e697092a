"""Numerics of each operation, and its speed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpu_check_parts.case import Case, Work, error_of, roofline_seconds
from gpu_check_parts.timing import Budget

Timer = Callable[[Callable[[], object]], float]
Say = Callable[[str], None]


def check_ops(
    cases: Iterable[Case], device: torch.device, timer: Timer, budget: Budget, say: Say
) -> list[dict[str, Any]]:
    """A record for each case; what fails says why and does not stop the others."""
    records = []
    for case in cases:
        record: dict[str, Any] = {"op": case.op, "case": case.label}
        records.append(record)
        if budget.is_spent:
            record["skipped"] = f"the {budget.seconds:.0f} s of this part are over"
            continue
        try:
            work = case.make(device)
            error, allowed = error_of(work.run(), work.reference(), work.tolerance)
            record |= {"error": error, "allowed": allowed, "passed": error <= allowed}
        except Exception as error:  # a kernel may fail in any way; the report holds which and how
            record |= {"passed": False, "failed": one_line(error)}
        else:
            try:
                record |= _speed(work, timer)
            except Exception as error:  # likewise
                record["not_timed"] = one_line(error)
        say(_line(record))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records


def one_line(error: Exception) -> str:
    """What went wrong, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _speed(work: Work, timer: Timer) -> dict[str, Any]:
    microseconds = timer(work.timed or work.run)
    least = roofline_seconds(work.launch) * 1e6
    record: dict[str, Any] = {
        "microseconds": microseconds,
        "roofline_microseconds": least,
        "roofline_fraction": least / microseconds,
        "bytes": work.launch.bytes,
        "flops": work.launch.flops,
    }
    if work.torch_run is not None:
        work.torch_run()
        record["torch_microseconds"] = timer(work.torch_run)
        record["times_torch"] = record["torch_microseconds"] / microseconds
    return record


def _line(record: dict[str, Any]) -> str:
    name = f"{record['op']}: {record['case']}"
    if "failed" in record:
        return f"{name}: FAILED {record['failed']}"
    text = f"{name}: error {record['error']:.1e} of {record['allowed']:.1e}" + ("" if record["passed"] else " WRONG")
    if "not_timed" in record:
        return f"{text}, not timed: {record['not_timed']}"
    text += f", {record['microseconds']:.1f} us, {record['roofline_fraction']:.0%} of the roofline"
    return text + (f", {record['times_torch']:.2f} x torch" if "times_torch" in record else "")
