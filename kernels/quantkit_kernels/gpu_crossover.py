"""Measure on a GPU up to how many rows the packed bodies are the faster ones; `crossover_table` keeps the result."""

from collections.abc import Callable

import torch

from quantkit_kernels.crossover_table import Crossover
from quantkit_kernels.triton_w4a16 import TritonW4A16
from quantkit_kernels.triton_w8a16 import TritonW8A16

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))  # [N, K] of an 8B Llama
ROWS = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
GROUP_SIZE = 128
WARM_UPS, REPEATS = 3, 20
FLUSH_BYTES = 1 << 28  # more than the caches hold
Timer = Callable[[Callable[[], object]], float]


def gpu_microseconds(function: Callable[[], object]) -> float:
    """Median time of a call on the GPU, in microseconds, with nothing of the weight left in the cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(WARM_UPS):
        function()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return sorted(times)[REPEATS // 2]


def most_rows(packed: dict[int, float], dense: dict[int, float]) -> int:
    """The largest number of rows up to which the packed body never takes longer, 1 at least."""
    most = 1
    for rows in sorted(packed):
        if packed[rows] > dense[rows]:
            break
        most = rows
    return most


def measure_crossover(device: torch.device, timer: Timer = gpu_microseconds) -> Crossover:
    """The entry of a device for the crossover table; times are sums over `SHAPES`."""
    bodies = {4: dict[str, dict[int, float]](), 8: dict[str, dict[int, float]]()}
    for times in bodies.values():
        times |= {"gemv": {}, "packed": {}, "dense": {}}
    for n, k in SHAPES:
        words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=device)
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
        scale = torch.rand(n, k // GROUP_SIZE, device=device).to(torch.bfloat16)
        weights: dict[int, TritonW4A16 | TritonW8A16] = {
            4: TritonW4A16(words, scale, GROUP_SIZE, torch.bfloat16),
            8: TritonW8A16(codes, scale, GROUP_SIZE, torch.bfloat16),
        }
        for bits, weight in weights.items():
            for rows in ROWS:
                _add_times(bodies[bits], weight, torch.randn(rows, k, device=device).to(torch.bfloat16), timer)
    return Crossover(
        w4a16_gemv_rows=int(bodies[4]["gemv"][1] <= bodies[4]["packed"][1]),
        w4a16_packed_rows=most_rows(bodies[4]["packed"], bodies[4]["dense"]),
        w8a16_gemv_rows=int(bodies[8]["gemv"][1] <= bodies[8]["packed"][1]),
        w8a16_packed_rows=most_rows(bodies[8]["packed"], bodies[8]["dense"]),
        source=f"measured: bfloat16, group {GROUP_SIZE}, torch {torch.__version__}",
    )


def _add_times(
    times: dict[str, dict[int, float]], weight: TritonW4A16 | TritonW8A16, x: torch.Tensor, timer: Timer
) -> None:
    """Add the times of one product to those of the other shapes."""
    rows = x.shape[0]
    found = {
        "packed": timer(lambda: weight.gemm(x)),
        "dense": timer(lambda: torch.nn.functional.linear(x, weight.dequantize())),
    }
    if rows == 1:
        found["gemv"] = timer(lambda: weight.gemv(x))
    for name, time in found.items():
        times[name][rows] = times[name].get(rows, 0.0) + time
