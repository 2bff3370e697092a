#!/usr/bin/env python3
"""Compare GGUF files by quantkit with those of llama.cpp's own quantizer at the same size: bytes, KL divergence, time.

    scripts/bench_gguf.py MODEL [--llama-cpp PYTHON] [--only "NAME;..."] [--folder DIR] [--text FILE] [--write]

MODEL is an ordinary folder of a family that transformers reads back from GGUF. Every file is written by `quantkit
export gguf` in a process of its own, which gives seconds (imports included) and peak memory. PYTHON is an interpreter
with llama-cpp-python, whose `llama_model_quantize` makes the baseline of the F16 file. The divergence is that of the
next-token distributions, original || file, in nats a token, over the first windows of FILE (by default the text that
quantkit carries for evaluation and nobody calibrates on); transformers runs both in float32. Files that lie in DIR
already are not written again; a baseline is called `llama.cpp Q4_0.gguf` or `llama.cpp Q4_K_M.gguf`, and counts
without PYTHON too, whose llama-cpp-python may have no `llama_model_quantize`.
--write puts the table into docs/GGUF.md. The last line of stdout is one JSON document.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from marked_page import machine_line, write_between_marks
from quantkit_eval.machine import describe_machine

IMPORTANCE = ("--calibration", "builtin")
FEEDBACK = (*IMPORTANCE, "--error-feedback")
SIZE_OF = "size of"  # an option that stands for --target-bpw at the size of another file
VARIANTS: dict[str, tuple[str, ...]] = {  # name -> options of the export
    "F16": ("--type", "F16"),
    **{
        f"{kind}{name}": ("--type", kind, *options)
        for kind in ("Q4_0", "Q4_K_M")
        for name, options in (("", ()), (" importance", IMPORTANCE), (" importance, feedback", FEEDBACK))
    },
    "types for a size": ("--type", "Q4_K_M", *IMPORTANCE, SIZE_OF, "Q4_K_M"),
    "types for a size, feedback": ("--type", "Q4_K_M", *FEEDBACK, SIZE_OF, "Q4_K_M"),
}
BASELINES = {"Q4_0": 2, "Q4_K_M": 15}  # name -> llama_ftype
QUANTIZE = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.nthread = int(sys.argv[3]), int(sys.argv[4])
failed = llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options)
print("VERSION", llama_cpp.__version__)
sys.exit(failed)
"""


def run(command: list[str]) -> tuple[dict[str, float], str]:
    """Seconds and peak memory in GB of a process, and what it printed; a failure ends the benchmark."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed ({process.returncode}):\n{err.read()[-2000:]}")
        cost = {"seconds": round(time.perf_counter() - started, 1), "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2)}
        return cost, out.read()


def export(model: Path, path: Path, options: tuple[str, ...], bits: dict[str, float]) -> dict[str, float]:
    """Write one file. ``bits`` is what each of the other files takes a weight, and gets this one's."""
    arguments = list(options)
    if SIZE_OF in arguments:
        at = arguments.index(SIZE_OF)
        arguments[at:] = ["--target-bpw", str(bits[arguments[at + 1]])]
    record_path = path.with_suffix(".json")
    if not record_path.exists():
        command = [sys.executable, "-m", "quantkit", "export", "gguf", str(model), "-o", str(path)]
        cost, printed = run([*command, "--overwrite", "--json", *arguments])
        record_path.write_text(json.dumps(cost | {"bits": json.loads(printed)["bits_per_weight"]}))
    record = json.loads(record_path.read_text())
    bits[path.stem] = record.pop("bits")
    return dict(record)


def quantize_with_llama_cpp(python: str, source: Path, path: Path, number: int) -> dict[str, Any]:
    """Let llama.cpp make the file of its named type."""
    threads = str(torch.get_num_threads())
    cost, printed = run([python, "-c", QUANTIZE, str(source), str(path), str(number), threads])
    version = next(line.split()[1] for line in printed.splitlines() if line.startswith("VERSION"))
    return {**cost, "llama_cpp_python": version}


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor) -> list[Tensor]:
    """[T - 1, V] of every window."""
    return [torch.log_softmax(model(window[None]).logits[0, :-1].float(), -1) for window in windows]


def divergence(path: Path, windows: Tensor, original: list[Tensor]) -> float:
    """Mean KL(original || file) in nats a token."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    parts = []
    for number, expected in enumerate(original):
        (found,) = log_probabilities(model, windows[number : number + 1])
        parts.append((expected.exp() * (expected - found)).sum(-1))
    return float(torch.cat(parts).mean())


def write_files(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Every file and, beside ours of a named type, llama.cpp's; with bytes, seconds and memory."""
    rows: dict[str, dict[str, Any]] = {}
    bits: dict[str, float] = {}
    for name in [name for name in VARIANTS if not options.only or name in options.only.split(";")]:
        rows[name] = export(options.model, folder / f"{name}.gguf", VARIANTS[name], bits)
        print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
        theirs = f"llama.cpp {name}"
        source, path = folder / "F16.gguf", folder / f"{theirs}.gguf"
        if name in BASELINES and path.exists():
            rows[theirs] = {"seconds": "", "peak_gb": "", "llama_cpp_python": "unknown (its files lay there)"}
        elif name in BASELINES and options.llama_cpp:
            rows[theirs] = quantize_with_llama_cpp(options.llama_cpp, source, path, BASELINES[name])
    for name, row in rows.items():
        row["bytes"] = (folder / f"{name}.gguf").stat().st_size
    return rows


def main() -> None:
    """Write every file, measure it, print the table."""
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bench-gguf-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_files(options, folder)  # before a model is in memory, which would count as the exports'
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    windows = ids[0, : options.windows * 512].view(-1, 512)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    original = log_probabilities(model, windows)
    del model
    for name, row in rows.items():
        row["kl"] = divergence(folder / f"{name}.gguf", windows, original)
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    machine = describe_machine()
    text = _markdown(rows, machine, options, int(windows.numel()))
    print(text)
    if options.write:
        write_between_marks("GGUF.md", "bench_gguf.py", text)
    print(json.dumps({"rows": rows, "machine": machine, "model": options.model.name}))


def _markdown(
    rows: dict[str, dict[str, Any]], machine: dict[str, Any], options: argparse.Namespace, num_tokens: int
) -> str:
    lines = ["| file | MB | KL, nats a token | against llama.cpp | seconds | peak GB |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        kind = next((kind for kind in BASELINES if kind in name), "Q4_K_M")
        base = rows.get(f"llama.cpp {kind}")
        ratio = f"{row['kl'] / base['kl']:.2f}" if base and name != "F16" else ""
        cells = (name, f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.4f}", ratio, row["seconds"], row["peak_gb"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    versions = {row["llama_cpp_python"] for row in rows.values() if "llama_cpp_python" in row}
    baseline = (
        f"llama-cpp-python {versions.pop()}, llama_model_quantize without an importance matrix" if versions else ""
    )
    return "\n".join(
        [
            f"Model {options.model.name}; {num_tokens} tokens of {options.text.name}, which nobody calibrated on; "
            f"baseline: {baseline or 'none'}. 'against llama.cpp' is the ratio to its file of the same type.",
            f"Machine: {machine_line(machine)}",
            "",
            *lines,
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--only", default="", help="names of files, with semicolons; the others are left out")
    parser.add_argument("--folder", type=Path, help="where files go and stay; a temporary one by default")
    parser.add_argument("--text", type=Path, default=Path(str(files("quantkit_eval").joinpath("data", "nll.txt"))))
    parser.add_argument("--windows", type=int, default=12, help="of 512 tokens")
    parser.add_argument("--write", action="store_true", help="put the table into docs/GGUF.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
