"""This machine's processor as a device: its memory, its products by number of rows, and the engine's own time.

Everything is timed through what the engine itself runs: the bodies that quantkit_kernels chooses here, and the runner
on models without width. It takes a few seconds.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.capacity.devices import Device, MeasuredProducts
from quantkit.capacity.model_facts import ModelFacts
from quantkit.primitives import QuantizedWeight
from quantkit.scheme import PRESETS
from quantkit.serve.batch import build_batch
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.memory import available_bytes
from quantkit.serve.models.loader import LoadedModel, load_model
from quantkit.serve.models.prepack import prepack
from quantkit.serve.request import Request, SamplingParams
from quantkit.serve.runner import ModelRunner
from quantkit.serve.sampler import Draw, sample
from quantkit.serve.scheduler import Scheduled
from quantkit.source import open_source
from quantkit_kernels import PreparedWeight, prepack_linear
from quantkit_kernels.cpu_capability import describe_cpu
from quantkit_kernels.dispatch import activation_dtype

SHAPE = (2048, 2048)  # of the matrices multiplied where no model is given
COPIED_BYTES = 64 << 20  # different matrices of together so many bytes, beyond the caches, as those of a model are
GROUP_SIZE = 64
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
READ_BYTES = 1 << 28
DTYPE = torch.bfloat16
DEPTHS, BATCHES = (2, 8), (1, 16)
CONTEXT, BLOCK_SIZE, STEPS = 64, 32, 12


def measure_cpu(
    facts: ModelFacts | None = None, *, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> Device:
    """The processor with the threads that torch may use now.

    Args:
        facts: multiply matrices of the shape that most of this model's parameters are in; small ones stay in caches.
        repeats: runs of each measurement; their median counts.
        clock: seconds. With one thread ``time.process_time`` disregards what other processes take.
    """
    timer = _Timer(repeats, clock)
    bytes_per_s = READ_BYTES / timer.seconds(torch.ones(READ_BYTES // 4).sum)
    products = _measure_products(_usual_shape(facts), bytes_per_s, timer)
    own = _measure_engine(timer)
    rows, seconds = products["16-bit"].points[-1]
    return Device(
        name="cpu",
        memory_bytes=float(available_bytes()),
        bytes_per_s=bytes_per_s,
        flops={"16-bit": 2 * rows / seconds},
        source=f"measured: {describe_cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        measured=products,
        step_seconds=own.step,
        layer_seconds=own.layer,
        request_layer_seconds=own.request_layer,
    )


@dataclass(frozen=True, slots=True)
class _Timer:
    repeats: int
    clock: Callable[[], float]

    def seconds(self, function: Callable[[], object]) -> float:
        """Median of some calls after a first one that does not count."""
        function()
        times = []
        for _ in range(self.repeats):
            start = self.clock()
            function()
            times.append(self.clock() - start)
        return statistics.median(times)


def _usual_shape(facts: ModelFacts | None) -> tuple[int, int]:
    """[N, K] of most of the parameters."""
    matrices = [weight for weight in facts.weights if weight.role in ("linear", "expert")] if facts is not None else []
    fitting = [weight for weight in matrices if weight.columns % GROUP_SIZE == 0]
    if not fitting:
        return SHAPE
    largest = max(fitting, key=lambda weight: weight.parameters)
    return largest.rows, largest.columns


def _measure_products(shape: tuple[int, int], bytes_per_s: float, timer: _Timer) -> dict[str, MeasuredProducts]:
    """Seconds a parameter by number of rows, of 16-bit matrices and of 4-bit ones, prepared as the engine does it."""
    out_features, in_features = shape
    parameters = out_features * in_features
    copies = max(2, COPIED_BYTES // (2 * parameters))
    activations = activation_dtype(torch.device("cpu"), DTYPE)
    codes = torch.zeros(shape, dtype=torch.int8)
    scale = torch.ones(out_features, in_features // GROUP_SIZE, dtype=DTYPE)
    four_bits = QuantizedWeight(codes, scale, PRESETS["W4A16"].with_group_size(GROUP_SIZE))
    kinds: dict[str, list[PreparedWeight]] = {
        "16-bit": [prepack_linear(torch.full(shape, 0.5, dtype=DTYPE))[0] for _ in range(copies)],
        "weight-only": [prepack(four_bits, DTYPE, None)[1] for _ in range(copies)],
    }
    points: dict[str, list[tuple[int, float]]] = {kind: [] for kind in kinds}
    for rows in ROWS:
        x = torch.full((rows, in_features), 0.5, dtype=activations)
        for kind, weights in kinds.items():

            def multiply(weights: list[PreparedWeight] = weights, x: torch.Tensor = x) -> None:
                for weight in weights:
                    weight(x)

            points[kind].append((rows, timer.seconds(multiply) / (copies * parameters)))
    return {kind: MeasuredProducts(tuple(found), bytes_per_s) for kind, found in points.items()}


@dataclass(frozen=True, slots=True)
class _OwnTime:
    step: float
    layer: float
    request_layer: float


def _measure_engine(timer: _Timer) -> _OwnTime:
    """The engine's own seconds, from models of two depths without width, with few and with many requests."""
    shallow, deep = (_narrow_model(depth) for depth in DEPTHS)
    times = {
        (depth, batch): _step_seconds(model, batch, timer)
        for depth, model in zip(DEPTHS, (shallow, deep), strict=True)
        for batch in BATCHES
    }
    layers = DEPTHS[1] - DEPTHS[0]
    one, many = ((times[DEPTHS[1], batch] - times[DEPTHS[0], batch]) / layers for batch in BATCHES)
    request_layer = max(0.0, (many - one) / (BATCHES[1] - BATCHES[0]))
    layer = max(0.0, one - request_layer)
    return _OwnTime(max(0.0, times[DEPTHS[0], 1] - DEPTHS[0] * one), layer, request_layer)


def _narrow_model(depth: int) -> LoadedModel:
    """A Llama of so little width that its products take no time, loaded as the engine loads a model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(DTYPE).save_pretrained(folder)
        return load_model(open_source(folder), DTYPE)


def _step_seconds(loaded: LoadedModel, batch: int, timer: _Timer) -> float:
    """Seconds of a decoding step: plan, run, sample."""
    blocks = -(-(CONTEXT + STEPS) // BLOCK_SIZE)
    cache = KVCache(loaded.shapes, batch * blocks + 1, BLOCK_SIZE, loaded.dtype)
    runner = ModelRunner(loaded.model, cache, loaded.dtype)
    requests = []
    for index in range(batch):
        request = Request(str(index), (1,) * CONTEXT, SamplingParams(temperature=0), STEPS, frozenset(), None, None)
        request.block_table = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
        requests.append(request)
    draws = [Draw(0.0, 1.0, None)] * batch

    def step() -> None:
        planned = [Scheduled(request, CONTEXT - 1, 1) for request in requests]
        sample(runner.forward(build_batch(planned, BLOCK_SIZE)), draws)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    return timer.seconds(steps) / STEPS
