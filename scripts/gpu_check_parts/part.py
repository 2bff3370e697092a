"""One part of the check, in this process."""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from gpu_check_parts.check_engine import check_engine
from gpu_check_parts.check_ops import check_ops, one_line
from gpu_check_parts.isolation import Records
from gpu_check_parts.timing import Budget, GpuTimer, cpu_microseconds
from quantkit_kernels import gpu_crossover
from quantkit_kernels.crossover_table import write_crossover
from quantkit_kernels.interpreter import interpret_triton

CASES = {"attention": "attention_cases", "products": "product_cases", "rows": "row_cases"}
SECONDS = {"attention": 80, "products": 80, "rows": 50, "crossover": 50, "engine": 140}  # of each part
Say = Callable[[str], None]


def device_name(*, dry_run: bool) -> str:
    """What the check runs on."""
    return "CPU, dry run" if dry_run else torch.cuda.get_device_name(0)


def run_part(name: str, first: int, records: Records, budget: Budget, say: Say, *, dry_run: bool) -> None:
    """Try all cases of a part from number ``first`` on; what was found is in ``records``."""
    device = torch.device("cpu") if dry_run else torch.device("cuda", 0)
    with interpret_triton() if dry_run else contextlib.nullcontext():
        timer = cpu_microseconds if dry_run else GpuTimer()
        if name == "engine":
            check_engine(device, budget, say, records, tiny=dry_run, first=first)
        elif name == "crossover":
            if not dry_run and first == 0:
                measure_crossover(device, timer, budget, say, records)
        else:
            cases = importlib.import_module(f"gpu_check_parts.{CASES[name]}").cases(tiny=dry_run)
            check_ops(cases[first:], device, timer, budget, say, records)


def measure_crossover(device: torch.device, timer: Any, budget: Budget, say: Say, records: Records) -> None:
    """Measure from how many rows on weights are dequantized, and keep that for this GPU."""

    def timed(function: Any) -> float:
        if budget.is_spent:
            raise TimeoutError(f"the {budget.seconds:.0f} s of this part are over")
        function()
        return float(timer(function))

    record = records.begin()
    try:
        entry = gpu_crossover.measure_crossover(device, timed)
        write_crossover(torch.cuda.get_device_name(device), entry)
    except Exception as error:  # whatever it is, the report holds it and the other parts run
        say(f"crossover: FAILED {one_line(error)}")
        records.end(record, failed=one_line(error))
        return
    say(f"crossover: {entry}")
    records.end(record, **asdict(entry))
