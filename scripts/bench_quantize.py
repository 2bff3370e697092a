#!/usr/bin/env python3
"""Time quantkit's GPTQ against peers on the same model and tokens, in turns, each in its own process; print ratios.

    scripts/bench_quantize.py MODEL TEXT [--peer gptqmodel=PYTHON] [--peer llmcompressor=PYTHON] [--repeats 1]

MODEL is an ordinary folder. TEXT is a file whose first windows calibrate. PYTHON is the interpreter of an environment
in which the peer is installed (they cannot share one). Without a peer the baseline is quantkit's RTN. The last line of
stdout is one JSON document with the seconds of each run, peak memory, the machine and the versions.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

RECIPE = """\
version: 1
model: {model}
calibration:
  sources: [{{kind: text, path: {text}}}]
  num_tokens: {num_tokens}
  window_tokens: {window_tokens}
quantization:
  scheme: W4A16
  group_size: {group_size}
  algorithm: {{name: {algorithm}}}
outputs: [{{format: compressed-tensors, path: {out}}}]
"""

OURS = """\
import sys, time
start = time.perf_counter()
from quantkit.pipeline import quantize_model
from quantkit.recipe import load_recipe
quantize_model(load_recipe(sys.argv[1]))
print("SECONDS", time.perf_counter() - start)
"""

GPTQMODEL = """\
import sys, time
model, text, out, windows, length, group = *sys.argv[1:4], *map(int, sys.argv[4:7])
start = time.perf_counter()
from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model)
ids = tokenizer(open(text, encoding="utf-8").read(), add_special_tokens=False).input_ids[: windows * length]
rows = [{"input_ids": ids[i : i + length], "attention_mask": [1] * length} for i in range(0, len(ids), length)]
peer = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=group, sym=True))
peer.quantize(rows, batch_size=4)
peer.save(out)
print("SECONDS", time.perf_counter() - start)
"""

LLMCOMPRESSOR = """\
import sys, time
model, text, out, windows, length, group = *sys.argv[1:4], *map(int, sys.argv[4:7])
start = time.perf_counter()
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(model)
ids = tokenizer(open(text, encoding="utf-8").read(), add_special_tokens=False).input_ids[: windows * length]
rows = [{"input_ids": ids[i : i + length], "attention_mask": [1] * length} for i in range(0, len(ids), length)]
weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
recipe = [GPTQModifier(config_groups={"g": scheme}, ignore=["lm_head"])]
data = Dataset.from_list(rows)
oneshot(model=loaded, dataset=data, recipe=recipe, max_seq_length=length, num_calibration_samples=windows)
loaded.save_pretrained(out, save_compressed=True)
print("SECONDS", time.perf_counter() - start)
"""

PEERS = {"gptqmodel": GPTQMODEL, "llmcompressor": LLMCOMPRESSOR}


def run(command: list[str]) -> dict[str, float]:
    """Seconds that the process reports, imports included, and its peak memory."""
    before = os.environ | {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": str(os.cpu_count())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=before) as process:
        out, err = process.communicate()
    marks = [line for line in out.splitlines() if line.startswith("SECONDS")]
    if process.returncode or not marks:
        sys.exit(f"{command[0]} failed ({process.returncode}):\n{err[-2000:]}")
    return {"seconds": round(float(marks[-1].split()[1]), 2)}


def main() -> None:
    """Run everything in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the checkpoints in this folder")
    options = parser.parse_args()
    peers = dict(entry.split("=", 1) for entry in options.peer)
    if unknown := set(peers) - set(PEERS):
        parser.error(f"unknown peer {min(unknown)}; choose from {', '.join(PEERS)}")
    names = ["quantkit-gptq", *(peers or ["quantkit-rtn"])]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(options.repeats):
            for name in names:
                out = (options.keep or Path(scratch)) / f"{name}-{repeat}"
                runs[name].append(run(_command(name, peers, options, out, Path(scratch))))
                print(f"{name}: {runs[name][-1]['seconds']:.1f} s", file=sys.stderr)
    median = {name: statistics.median(r["seconds"] for r in results) for name, results in runs.items()}
    for name in names[1:]:
        print(f"quantkit-gptq / {name}: {median['quantkit-gptq'] / median[name]:.2f} of its time")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "quantkit")}
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    tokens = options.windows * options.window_tokens
    print(json.dumps({"runs": runs, "tokens": tokens, "versions": versions, "machine": machine}))


def _command(name: str, peers: dict[str, str], options: argparse.Namespace, out: Path, scratch: Path) -> list[str]:
    if name in peers:
        numbers = [str(value) for value in (options.windows, options.window_tokens, options.group_size)]
        return [peers[name], "-c", PEERS[name], str(options.model), str(options.text), str(out), *numbers]
    recipe = scratch / f"{out.name}.yaml"
    recipe.write_text(
        RECIPE.format(
            model=options.model.resolve(),
            text=options.text.resolve(),
            num_tokens=options.windows * options.window_tokens,
            window_tokens=options.window_tokens,
            group_size=options.group_size,
            algorithm=name.removeprefix("quantkit-"),
            out=out,
        ),
        encoding="utf-8",
    )
    return [sys.executable, "-c", OURS, str(recipe)]


if __name__ == "__main__":
    main()
