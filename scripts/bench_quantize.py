#!/usr/bin/env python3
"""Time quantkit against peers on the same model and tokens, in turns, each in its own process; judge what they wrote.

    scripts/bench_quantize.py MODEL TEXT [--ours gptq,rtn,...] [--peer gptqmodel=PYTHON] [--repeats 1]
                              [--folder NAME=CHECKPOINT] [--judge] [--write]

MODEL is an ordinary folder. TEXT is a file whose first windows calibrate. PYTHON is the interpreter of an environment
in which the peer is installed (they cannot share one). Without a peer the baseline is quantkit's RTN. With --judge
every checkpoint, and those of --folder, is then measured by `quantkit eval` against the original: KL divergence on the
text that quantkit carries, which nobody calibrated on, and JSON extractions that are exactly right. --write puts the
table into docs/BENCHMARKS.md. The last line of stdout is one JSON document with all of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_quantize_parts.judge import judge
from bench_quantize_parts.peers import PEERS
from bench_quantize_parts.recipes import OURS, RUN, recipe
from marked_page import machine_line, write_between_marks
from quantkit_eval.machine import describe_machine


def run(command: list[str]) -> dict[str, float]:
    """Seconds that the process reports, imports included, and its peak memory in GiB."""
    before = os.environ | {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": str(os.cpu_count())}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=before)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        marks = [line for line in out.read().splitlines() if line.startswith("SECONDS")]
        if process.returncode or not marks:
            sys.exit(f"{command[0]} failed ({process.returncode}):\n{err.read()[-2000:]}")
    return {"seconds": round(float(marks[-1].split()[1]), 2), "peak_gib": round(used.ru_maxrss / 2**20, 2)}


def main() -> None:
    """Run everything in turns and print the table."""
    options = _options()
    peers = dict(entry.split("=", 1) for entry in options.peer)
    names = [*(f"quantkit {name}" for name in options.ours.split(",") if name), *peers]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        kept = options.keep or scratch
        for repeat in range(options.repeats):
            for name in names:
                out = kept / f"{name.replace(' ', '-')}-{repeat}"
                runs[name].append(run(_command(name, peers, options, out, scratch)))
                print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
        quality: dict[str, Any] = {}
        if options.judge:
            folders = {name: kept / f"{name.replace(' ', '-')}-0" for name in names}
            folders |= {name: Path(path) for name, path in (entry.split("=", 1) for entry in options.folder)}
            quality = judge(options.model, folders, scratch, options.items, options.kl_windows)
    text = _table(runs, quality, options)
    print(text)
    if options.write:
        write_between_marks("BENCHMARKS.md", "bench_quantize.py", text)
    print(json.dumps({"runs": runs, "quality": quality, "machine": describe_machine()}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ours", default="gptq,rtn", help=f"some of {', '.join(OURS)}; default: gptq,rtn")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    parser.add_argument("--folder", action="append", default=[], metavar="NAME=CHECKPOINT", help="only judged")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the checkpoints in this folder")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--items", type=int, default=128, help="of extract")
    parser.add_argument("--kl-windows", type=int, default=16)
    parser.add_argument("--write", action="store_true", help="put the table into docs/BENCHMARKS.md")
    options = parser.parse_args()
    for given, known in ((options.ours.split(","), OURS), ((entry.split("=")[0] for entry in options.peer), PEERS)):
        if unknown := set(given) - set(known) - {""}:
            parser.error(f"unknown {min(unknown)!r}; choose from {', '.join(known)}")
    return options


def _command(name: str, peers: dict[str, str], options: argparse.Namespace, out: Path, scratch: Path) -> list[str]:
    model, text = options.model.resolve(), options.text.resolve()
    if name in peers:
        numbers = [str(value) for value in (options.windows, options.window_tokens, options.group_size)]
        return [peers[name], "-c", PEERS[name], str(model), str(text), str(out), *numbers]
    path = scratch / f"{out.name}.yaml"
    num_tokens = options.windows * options.window_tokens
    ours = name.removeprefix("quantkit ")
    path.write_text(
        recipe(ours, model, text, out, num_tokens, options.window_tokens, options.group_size), encoding="utf-8"
    )
    return [sys.executable, "-c", RUN, str(path)]


def _table(runs: dict[str, list[dict[str, float]]], quality: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [
        f"{options.model.name}; {machine_line(describe_machine())} Peers run in environments of their own. "
        f"Calibration: {options.windows} x {options.window_tokens} tokens; 4-bit weights in groups of "
        f"{options.group_size}.",
        "",
        "| quantizer | seconds | of quantkit gptq's time | peak GiB | KL, nats a token | top-1 kept | JSON exact |",
        "|---|---|---|---|---|---|---|",
    ]
    medians = {name: statistics.median(one["seconds"] for one in found) for name, found in runs.items()}
    ours = medians.get("quantkit gptq")
    for name in dict.fromkeys([*quality, *runs]):
        cells = ["", "", ""]
        if name in runs:
            ratio = f"{medians[name] / ours:.2f}" if ours else ""
            cells = [f"{medians[name]:.0f}", ratio, f"{max(one['peak_gib'] for one in runs[name]):.2f}"]
        lines.append(" | ".join([f"| {name}", *cells, *_quality(quality.get(name, {}))]) + " |")
    return "\n".join(lines)


def _quality(metrics: dict[str, Any]) -> list[str]:
    """Cells: the KL divergence, top-1 agreement, exact answers; each with its 95 % interval."""
    cells = []
    for suite, metric, form in (
        ("nll", "kl_mean_nats", "{:.3f}"),
        ("nll", "top1_agreement", "{:.1%}"),
        ("extract", "exact", "{:.1%}"),
    ):
        found = metrics.get(suite, {}).get(metric)
        if found is None or found["value"] is None:
            cells.append("")
            continue
        low, high = (form.format(bound) for bound in found["interval"])
        cells.append(f"{form.format(found['value'])} ({low} to {high})")
    return cells


if __name__ == "__main__":
    main()
