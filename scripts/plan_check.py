#!/usr/bin/env python3
"""Check the roofline of `quantkit plan` on this machine's processor, and write the figures into docs/PLAN.md.

    scripts/plan_check.py MODEL [--new-tokens 24] [--repeats 3] [--write]

MODEL is an ordinary model. Its 4-bit checkpoint is made by rounding to nearest in a temporary folder. The processor is
measured, then both models are run by what `quantkit bench` runs, then the processor is measured again; a prediction
from the mean of both stands beside the median of the runs. One thread and CPU time, so that other processes on the
machine disturb it less. The exit code is 1 if a prediction is off by more than the factor 1.5.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

from marked_page import write_between_marks
from quantkit.capacity.devices import Device, MeasuredProducts
from quantkit.capacity.kv_footprint import KV_DTYPES, QUANTKIT
from quantkit.capacity.measured_cpu import measure_cpu
from quantkit.capacity.read_facts import read_facts
from quantkit.capacity.roofline import SpeedModel
from quantkit.capacity.simulation import ServerSettings, batch_rate
from quantkit.capacity.weight_schemes import SCHEME_BY_NAME
from quantkit.pipeline import quantize_model
from quantkit.recipe import parse_recipe
from quantkit.serve import Engine, EngineConfig, EngineModel
from quantkit.source import open_source
from quantkit_eval.machine import describe_machine
from quantkit_eval.throughput import measure_throughput

FACTOR = 1.5
BATCHES = (1, 4, 16)
PROMPT_TOKENS = 40  # of the bench's short prompts with a chat template, about
RECIPE = """\
version: 1
quantization:
  scheme: W4A16
  group_size: auto
  algorithm: {{name: rtn}}
outputs: [{{format: compressed-tensors, path: {out}}}]
"""


def main() -> int:
    """Measure, compare, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/PLAN.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = open_source(options.model)
    facts = read_facts(str(source.folder))
    with tempfile.TemporaryDirectory() as scratch:
        recipe = parse_recipe(RECIPE.format(out=Path(scratch) / "w4a16")).with_model(options.model)
        quantize_model(recipe)
        config = EngineConfig(
            dtype="bfloat16", max_model_len=1024, max_num_seqs=max(BATCHES), kv_block_size=32,
            enable_prefix_caching=False,  # every run is to compute its prompts
        )  # fmt: skip
        engines = [EngineModel(Engine(model, config)) for model in (source, Path(scratch) / "w4a16")]
        before = measure_cpu(facts, clock=time.process_time)
        record = measure_throughput(
            *engines, BATCHES, options.new_tokens, options.repeats, clock=time.process_time,
            progress=lambda *done: print(*done, file=sys.stderr),
        )  # fmt: skip
        device = _mean(before, measure_cpu(facts, clock=time.process_time))
    settings = ServerSettings(4096, 32, max(BATCHES), config.max_num_batched_tokens, 1024)
    four = next(name for name in ("W4A16 g128", "W4A16 g64", "W4A16 g32") if _divides(facts, name))
    rows = []
    for batch in record["batches"].values():
        for name, key in (("16-bit", "baseline_tok_per_s"), (four, "candidate_tok_per_s")):
            speed = SpeedModel(facts, SCHEME_BY_NAME[name], device, KV_DTYPES["16-bit"], QUANTKIT)
            predicted = batch_rate(speed, settings, batch["batch_size"], PROMPT_TOKENS, options.new_tokens)
            measured = statistics.median(batch[key])  # type: ignore[literal-required]
            rows.append((batch["batch_size"], name, predicted, measured, predicted / measured))
    text = _text(facts.name, rows, device)
    print(text)
    print(json.dumps({"rows": rows, "device": device.to_dict()}))
    if options.write:
        write_between_marks("PLAN.md", "plan_check.py", text)
    return int(any(max(ratio, 1 / ratio) > FACTOR for *_, ratio in rows))


def _divides(facts: object, name: str) -> bool:
    size = SCHEME_BY_NAME[name].group_size
    return all(w.columns % size == 0 for w in facts.weights if w.role == "linear")  # type: ignore[attr-defined]


def _mean(first: Device, second: Device) -> Device:
    """The processor as it was on the average of two measurements."""
    rate = (first.bytes_per_s + second.bytes_per_s) / 2
    products = {
        kind: MeasuredProducts(
            tuple(
                (rows, (one + other) / 2)
                for (rows, one), (_, other) in zip(found.points, second.measured[kind].points, strict=True)
            ),
            rate,
        )
        for kind, found in first.measured.items()
    }
    return Device(
        "cpu", first.memory_bytes, rate, first.flops, first.source, products,
        (first.step_seconds + second.step_seconds) / 2,
        (first.layer_seconds + second.layer_seconds) / 2,
        (first.request_layer_seconds + second.request_layer_seconds) / 2,
    )  # fmt: skip


def _text(model: str, rows: list[tuple[int, str, float, float, float]], device: Device) -> str:
    machine = describe_machine()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("quantkit", "torch", "transformers"))
    lines = [
        f"Model {model}; {machine['cpu']}, one thread, CPU time; {platform.python_implementation()} "
        f"{platform.python_version()}, {versions}.",
        f"Measured: memory {device.bytes_per_s / 1e9:.1f} GB/s, 16-bit products {device.flops['16-bit'] / 1e9:.0f} "
        f"GFLOP/s at 256 rows, the engine's own time {1e3 * device.step_seconds:.1f} ms a step, "
        f"{1e3 * device.layer_seconds:.2f} ms a layer, {1e6 * device.request_layer_seconds:.0f} us of it a request.",
        "",
        "| batch | scheme | predicted tok/s | measured tok/s | predicted / measured |",
        "|---|---|---|---|---|",
        *(f"| {batch} | {name} | {one:.1f} | {two:.1f} | {ratio:.2f} |" for batch, name, one, two, ratio in rows),
        "",
        f"Largest factor between the two: {max(max(r, 1 / r) for *_, r in rows):.2f} (allowed: {FACTOR}).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
