#!/usr/bin/env python3
"""Time the engine with its own decoder, with transformers' definition and in peers, in turns; print the ratios.

    scripts/bench_serve.py MODEL [--variants bf16 W4A16 W8A8] [--peer vllm=PYTHON] [--repeats 3] [--threads N]
                           [--peer llamacpp=PYTHON --gguf FILE ...]

MODEL is an ordinary folder; the quantized variants are made from it by rounding to nearest. Every run is a process of
its own: it loads (seconds to the first token, imports apart), decodes 64 tokens for 1 and for 32 sequences behind a
prompt of 32 tokens (tokens a second, the prompts' time taken off), and reads a prompt of 1,024 tokens, likewise. The
baseline of each variant is transformers' definition in the same engine; a peer, given the interpreter in which it is
installed, is set beside it; one that cannot run a checkpoint is left out, and that is said. Of our runs it is also
shown which part of a decode step is spent outside products and attention, and how many times fewer tokens are computed
of 32 prompts of 1,008 tokens that share 1,000, with the prefix cache. The last line of stdout is one JSON document with
every run, the kernels, the machine and the versions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from marked_page import machine_line, write_between_marks
from quantkit_eval.machine import describe_machine

RECIPE = """\
version: 1
model: {model}
quantization: {{scheme: {scheme}, algorithm: {{name: rtn}}{group}}}
outputs: [{{format: compressed-tensors, path: {out}}}]
"""

# Each runner defines load(path, threads) -> generate(prompts, new_tokens) and report(); MEASURE times the first.
OURS = """\
import time
from functools import partial
import torch
from quantkit.serve import Engine, EngineConfig, SamplingParams
from quantkit.serve import engine as engine_module
from quantkit.serve.models import decoder
from quantkit.serve.models.loader import load_model
from quantkit.serve.models.projection import Projection
def load(path, threads, definition="{definition}"):
    torch.set_num_threads(threads)
    engine_module.load_model = partial(load_model, definition=definition)
    engine = Engine(path, EngineConfig(max_model_len=2048, max_num_batched_tokens=1024, enable_prefix_caching=False))
    def generate(prompts, count):
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    def report(steps=8):
        for i in range(32):
            params = SamplingParams(temperature=0, max_tokens=3 * steps, ignore_eos=True)
            engine.add_request(list(range(10 + i, 42 + i)), params, stream=False)
        for _ in range(4):
            engine.step()
        inside = [0.0]
        def timed(function):
            def call(*arguments):
                start = time.perf_counter()
                result = function(*arguments)
                inside[0] += time.perf_counter() - start
                return result
            return call
        products, attention = Projection.__call__, decoder.attend
        Projection.__call__, decoder.attend = timed(products), timed(attention)
        compiled = getattr(engine._loaded.model, "compiled", None)
        def compiled_seconds():
            return sum(compiled.seconds[:2]) if hasattr(compiled, "seconds") else 0.0
        before = compiled_seconds()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = time.perf_counter() - start
        inside[0] += compiled_seconds() - before
        share = round(1 - inside[0] / whole, 3) if inside[0] else None  # None: products of transformers
        Projection.__call__, decoder.attend = products, attention
        while engine.has_unfinished:
            engine.step()
        shared = Engine(engine.source, EngineConfig(max_model_len=2048, max_num_batched_tokens=1024))
        prompts = [list(range(10, 1010)) + [20 + i] * 8 for i in range(32)]
        shared.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
        asked, found = shared.metrics.prefix_cache_queries, shared.metrics.prefix_cache_hits
        return {
            "kernels": engine.describe()["engine"]["kernels"],
            "outside_products_of_32": share,
            "prefix_work_ratio": round(asked / (asked - found), 1),
        }
    return generate, report
"""

VLLM = """\
import os
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import LLM, SamplingParams
def load(path, threads):
    model = LLM(path, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, enable_prefix_caching=False)
    def generate(prompts, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        model.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return generate, dict
"""

LLAMACPP = """\
from llama_cpp import Llama
def load(path, threads):
    model = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    def generate(prompts, count):
        for ids in prompts:
            model.reset()
            model.eval(ids)
            for _ in range(count - 1):
                model.eval([model.sample(temp=0.0)])
    return generate, dict
"""

MEASURE = """\
import json, sys, time
path, threads, many, count, prompt, long, passes = sys.argv[1], *map(int, sys.argv[2:8])
start = time.perf_counter()
generate, report = load(path, threads)
generate([list(range(10, 18))], 1)
found = {"load_seconds": time.perf_counter() - start}
def seconds(sequences, length, new_tokens):
    prompts = [[10 + (7 * i + j) % 900 for j in range(length)] for i in range(sequences)]
    times = []
    for _ in range(passes):
        start = time.perf_counter()
        generate(prompts, new_tokens)
        times.append(time.perf_counter() - start)
    return min(times)
for sequences in (1, many) if many else (1,):
    decode = seconds(sequences, prompt, count) - seconds(sequences, prompt, 1)
    found[f"decode_{sequences}"] = sequences * (count - 1) / decode
found["prefill"] = long / seconds(1, long, 1)
print("RESULT", json.dumps({"figures": found, "report": report()}))
"""

RUNNERS = {
    "quantkit": OURS.replace("{definition}", "quantkit"),
    "transformers": OURS.replace("{definition}", "transformers"),
    "vllm": VLLM,
    "llamacpp": LLAMACPP,
}
PEERS = ("vllm", "llamacpp")


def run(name: str, python: str, path: Path, options: argparse.Namespace) -> dict[str, object] | None:
    """What one process measures; None where a peer fails."""
    many = 0 if name == "llamacpp" else options.sequences  # its Python binding runs one sequence at a time
    numbers = (options.threads, many, options.new_tokens, 32, options.long_prompt, options.passes)
    command = [python, "-c", RUNNERS[name] + MEASURE, str(path), *map(str, numbers)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    marks = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    if process.returncode or not marks:
        message = f"{name} on {path.name} failed ({process.returncode}):\n{process.stderr[-2000:]}"
        if name not in PEERS:
            sys.exit(message)
        print(message, file=sys.stderr)
        return None
    result: dict[str, object] = json.loads(marks[-1].removeprefix("RESULT"))
    return result


def make_variants(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Name of a variant -> its checkpoint."""
    from quantkit.pipeline import quantize_model
    from quantkit.recipe import load_recipe

    made = {}
    for scheme in options.variants:
        made[scheme] = options.model.resolve()
        if scheme != "bf16":
            made[scheme] = folder / scheme
            group = ", group_size: auto" if scheme.startswith("W4") else ""
            recipe = folder / f"{scheme}.yaml"
            text = RECIPE.format(model=options.model.resolve(), scheme=scheme, group=group, out=made[scheme])
            recipe.write_text(text, encoding="utf-8")
            quantize_model(load_recipe(recipe))
    return made


def plan_runs(options: argparse.Namespace, variants: dict[str, Path]) -> dict[str, tuple[str, str, Path]]:
    """Label -> (runner, interpreter, checkpoint)."""
    runs = {}
    for variant, path in variants.items():
        for name in ("quantkit", "transformers"):
            runs[f"{name} {variant}"] = name, sys.executable, path
    for name, python in options.peers.items():
        if name == "llamacpp":
            runs |= {f"llamacpp {path.name}": (name, python, path.resolve()) for path in options.gguf}
        else:
            runs |= {f"{name} {variant}": (name, python, path) for variant, path in variants.items()}
    return runs


def main() -> None:
    """Run everything in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variants", nargs="+", default=["bf16", "W4A16", "W8A8"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    parser.add_argument("--gguf", type=Path, nargs="+", help="what llamacpp runs")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--long-prompt", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--passes", type=int, default=2, help="of each measurement in a run; the fastest counts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/BENCHMARKS.md")
    options = parser.parse_args()
    options.peers = dict(entry.split("=", 1) for entry in options.peer)
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"unknown peer {min(unknown)}; choose from {', '.join(PEERS)}")
    if "llamacpp" in options.peers and options.gguf is None:
        parser.error("llamacpp needs --gguf FILE")
    with tempfile.TemporaryDirectory() as scratch:
        runs = plan_runs(options, make_variants(options, Path(scratch)))
        results: dict[str, list[dict[str, object]]] = {label: [] for label in runs}
        for _ in range(options.repeats):
            for label, arguments in list(runs.items()):
                found = run(*arguments, options)
                if found is None:
                    del runs[label], results[label]
                    continue
                results[label].append(found)
                print(f"{label}: {found['figures']}", file=sys.stderr, flush=True)
    medians = {label: _medians([result["figures"] for result in found]) for label, found in results.items()}
    _print_table(medians, options.variants)
    outside = {label: _outside(found) for label, found in results.items()}
    for label, share in outside.items():
        if share is not None:
            print(f"{label}: share of a decode step of 32 outside products and attention {share:.0%}")
    prefix_ratio = _prefix_ratio(results[f"quantkit {options.variants[0]}"])
    print(f"prefix cache: {prefix_ratio:.1f} times fewer tokens computed of 32 prompts that share 1,000 of 1,008")
    if options.write:
        text = _markdown(medians, outside, prefix_ratio, options)
        write_between_marks("BENCHMARKS.md", "bench_serve.py", text)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "quantkit")}
    document = {"medians": medians, "runs": results, "versions": versions}
    print(json.dumps(document | {"machine": describe_machine(), "threads": options.threads}))


def _outside(found: list[dict[str, object]]) -> float | None:
    """Median share of a decoding step outside products and attention; None for a peer and transformers' definition."""
    reports = [one["report"] for one in found]
    known = [report["outside_products_of_32"] for report in reports if isinstance(report, dict) and report]
    shares = [share for share in known if share is not None]
    return statistics.median(shares) if shares else None


def _prefix_ratio(found: list[dict[str, object]]) -> float:
    """How many times less the prefix cache leaves to compute; the same in every run."""
    report = found[0]["report"]
    assert isinstance(report, dict), "one of our runs"
    return float(report["prefix_work_ratio"])


def _markdown(
    medians: dict[str, dict[str, float]],
    outside: dict[str, float | None],
    prefix_ratio: float,
    options: argparse.Namespace,
) -> str:
    """A row a run, each rate beside the ratio of our first variant's to it."""
    first = medians[f"quantkit {options.variants[0]}"]
    names = [name for name in first if name != "load_seconds"]
    lines = [
        f"{options.model.name}; {machine_line(describe_machine())} {options.threads} threads, {options.repeats} runs "
        f"of each. In brackets: quantkit {options.variants[0]} as a multiple of it. Of 32 prompts that share 1,000 of "
        f"1,008 tokens the prefix cache leaves {prefix_ratio:.1f} times less to compute.",
        "",
        f"| engine | {' | '.join(name.replace('_', ' ') for name in names)} | first token after | outside |",
        "|---" * (len(names) + 3) + "|",
    ]
    for label, row in medians.items():
        cells = [f"{row[name]:.1f} ({first[name] / row[name]:.2f})" if name in row else "" for name in names]
        share = outside[label]
        cells += [f"{row['load_seconds']:.1f} s", "" if share is None else f"{share:.0%}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _medians(figures: list[object]) -> dict[str, float]:
    rows = [dict[str, float](one) for one in figures if isinstance(one, dict)]
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def _print_table(medians: dict[str, dict[str, float]], variants: list[str]) -> None:
    """The figures, then our rates as multiples of the baseline's and of our own first variant's."""
    for label, row in medians.items():
        print(f"{label:28}", *(f"{name} {value:8.2f}" for name, value in row.items()), sep="  ")
    for variant in variants:
        ours = medians[f"quantkit {variant}"]
        others = {label: row for label, row in medians.items() if label.endswith(f" {variant}")}
        others |= {label: row for label, row in medians.items() if label.startswith("llamacpp")}
        others[f"quantkit {variants[0]}"] = medians[f"quantkit {variants[0]}"]
        for label, row in others.items():
            if row is not ours:
                ratios = (f"{name} {ours[name] / row[name]:5.2f}x" for name in ours if name in row)
                print(f"quantkit {variant} / {label}:", *ratios, sep="  ")


if __name__ == "__main__":
    main()
