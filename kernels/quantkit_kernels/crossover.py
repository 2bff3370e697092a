"""Measure on this machine where one body overtakes another: ``python -m quantkit_kernels.crossover``.

With a GPU its entry in ``crossover.json`` is measured and written (`gpu_crossover`); otherwise the CPU bodies are.

Prints microseconds of CPU time for each shape and number of rows, as JSON lines, for one thread; the constants
`cpu_w4a16.MAX_INT4_ROWS`, `cpu_int8.MAX_INT8_ROWS` and `cpu_linear.MIN_WIDENED_ROWS` come from it. CPU time instead of
wall time, so that other processes on the machine disturb it less.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F

from quantkit_kernels.cpu_capability import describe_cpu
from quantkit_kernels.cpu_half import CpuHalf
from quantkit_kernels.cpu_int8 import widened_product
from quantkit_kernels.cpu_linear import widened_linear
from quantkit_kernels.cpu_w4a16 import CpuW4A16

SHAPES = ((1536, 576), (576, 1536), (576, 576), (192, 576))  # [N, K] of a 135M Llama
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
GROUP_SIZE = 64
REPEATS = 7


def cpu_microseconds(function: Callable[[], object]) -> float:
    """Least CPU time of a few calls, in microseconds."""
    function()
    times = []
    for _ in range(REPEATS):
        start = time.process_time_ns()
        function()
        times.append(time.process_time_ns() - start)
    return min(times) / 1000


def measure(out_features: int, in_features: int) -> list[dict[str, object]]:
    """One record for each number of rows: the bodies side by side."""
    dtype = torch.bfloat16
    words = torch.randint(-(2**31), 2**31 - 1, (out_features, in_features // 8), dtype=torch.int32)
    scale = torch.rand(out_features, in_features // GROUP_SIZE).to(dtype)
    packed = CpuW4A16(words, scale, GROUP_SIZE, dtype)
    weight = torch.randn(out_features, in_features, dtype=dtype)
    half = CpuHalf(weight)
    codes = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    row_scale = torch.rand(out_features, 1).to(dtype)
    records: list[dict[str, object]] = []
    for rows in ROWS:
        x = torch.randn(rows, in_features, dtype=dtype)
        bodies: dict[str, Callable[[], object]] = {
            "int4pack": lambda x=x: packed._int4_product(x),  # type: ignore[misc]
            "dequantized": lambda x=x: packed._dense_product(x),  # type: ignore[misc]
            "int8pack": lambda x=x: torch._weight_int8pack_mm(x, codes, row_scale.flatten()),  # type: ignore[misc]
            "int8_widened": lambda x=x: widened_product(x.float(), codes, row_scale.float()),  # type: ignore[misc]
            "int_mm": lambda x=x: torch._int_mm(x.to(torch.int8), codes.t()),  # type: ignore[misc]
            "bfloat16": lambda x=x: F.linear(x, weight),  # type: ignore[misc]
            "widened": lambda x=x: widened_linear(x, weight),  # type: ignore[misc]
            "float16": lambda x=x: half(x),  # type: ignore[misc]
        }
        times = {f"{name}_us": round(cpu_microseconds(body), 1) for name, body in bodies.items()}
        records.append({"n": out_features, "k": in_features, "rows": rows, **times})
    return records


def records() -> Iterator[dict[str, object]]:
    """The machine, then what is measured for each shape; with a GPU its entry of the table, which is kept.

    Raises:
        OSError: the table cannot be written.
    """
    if torch.cuda.is_available():
        from quantkit_kernels.crossover_table import TABLE, write_crossover
        from quantkit_kernels.gpu_crossover import measure_crossover

        name = torch.cuda.get_device_name(0)
        entry = measure_crossover(torch.device("cuda", 0))
        write_crossover(name, entry)
        yield {"device": name, "written_to": str(TABLE), **asdict(entry)}
        return
    torch.set_num_threads(1)
    yield {"cpu": describe_cpu(), "torch": torch.__version__}
    for out_features, in_features in SHAPES:
        yield from measure(out_features, in_features)


def main() -> None:
    """Print all of it, a JSON object a line."""
    for record in records():
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
