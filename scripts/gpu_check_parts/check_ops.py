"""Numerics of each operation, and its speed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gpu_check_parts.case import Case, Work, error_of, roofline_seconds
from gpu_check_parts.isolation import Records
from gpu_check_parts.timing import Budget

Timer = Callable[[Callable[[], object]], float]
Say = Callable[[str], None]


class BrokenContextError(Exception):
    """The GPU does nothing more for this process."""


def check_ops(
    cases: Iterable[Case],
    device: torch.device,
    timer: Timer,
    budget: Budget,
    say: Say,
    records: Records | None = None,
) -> list[dict[str, Any]]:
    """A record for each case; what fails says why and does not stop the others.

    Raises:
        BrokenContextError: behind a case that left the GPU unusable.
    """
    kept = Records() if records is None else records
    for case in cases:
        record = kept.begin(op=case.op, case=case.label)
        if budget.is_spent:
            kept.end(record, skipped=f"the {budget.seconds:.0f} s of this part are over")
            continue
        kept.end(record, **_tried(case, device, timer))
        say(_line(record))
        require_usable(device, f"{case.op}: {case.label}")
    return kept.all


def require_usable(device: torch.device, after: str) -> None:
    """Give memory back, and see that a GPU still answers.

    Raises:
        BrokenContextError: it does not.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise BrokenContextError(f"after {after}: {one_line(error)}") from error


def _tried(case: Case, device: torch.device, timer: Timer) -> dict[str, Any]:
    try:
        work = case.make(device)
        error, allowed = error_of(work.run(), work.reference(), work.tolerance)
    except Exception as error:  # a kernel may fail in any way; the report holds which and how
        return {"passed": False, "failed": one_line(error)}
    found = {"error": error, "allowed": allowed, "passed": error <= allowed}
    try:
        return found | _speed(work, timer)
    except Exception as error:  # likewise
        return found | {"not_timed": one_line(error)}


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
