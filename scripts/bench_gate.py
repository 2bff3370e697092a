#!/usr/bin/env python3
"""Time the standard gate on one checkpoint, suite by suite.

    scripts/bench_gate.py MODEL [--items 100] [--structured-items 300] [--windows 0] [--threads N] [--batch-items 64]
                          [--profile] [--write]

The standard gate asks 300 items of ``extract`` and ``schema``, 100 of every other suite, and scores the whole text of
``nll`` (about 20,000 tokens). Smaller numbers give a quick look, and the seconds that the standard numbers would take
are then a proportion, which the table says. --write puts the table into docs/GATE.md. The last line of stdout is one
JSON document with machine and versions.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path

import torch

from marked_page import machine_line, write_between_marks
from quantkit.gate import engine_config
from quantkit.serve import Engine
from quantkit.source import open_source
from quantkit.text_model import EngineTextModel
from quantkit_eval.evaluate import evaluate
from quantkit_eval.machine import describe_machine
from quantkit_eval.suites import BATCH_ITEMS, SUITES

STRUCTURED = ("extract", "schema")
STANDARD = {name: 300 if name in STRUCTURED else 100 for name in SUITES if name != "nll"}
LIMIT_S = 600
SHOWN = 25  # functions of a profile


class Stopwatch:
    """Seconds of each suite, from what ``evaluate`` tells of its progress."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.items: dict[str, int] = {}
        self._last = time.perf_counter()

    def __call__(self, suite: str, done: int, total: int) -> None:
        """Add the time since the last call to the suite that has just done something."""
        now = time.perf_counter()
        self.seconds[suite] = self.seconds.get(suite, 0.0) + now - self._last
        self.items[suite] = done
        self._last = now


def suites(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Suite -> how much of it is asked."""
    chosen: dict[str, dict[str, int]] = {}
    for name in options.suites:
        if name == "nll":
            chosen[name] = {"max_windows": options.windows}
        else:
            chosen[name] = {"num_items": options.structured_items if name in STRUCTURED else options.items}
    return chosen


def main() -> None:
    """Evaluate once and print a row a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=list(SUITES))
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--structured-items", type=int, default=300)
    parser.add_argument("--windows", type=int, default=0, help="of nll; 0 is the whole text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch-items", type=int, default=BATCH_ITEMS, help="items that the model gets at once")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--write", action="store_true", help="put the table into docs/GATE.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    source = open_source(options.model)
    model = EngineTextModel(Engine(source, engine_config(source)))
    load_s = time.perf_counter() - started
    watch, profile = Stopwatch(), cProfile.Profile()
    if options.profile:
        profile.enable()
    with tempfile.TemporaryDirectory() as scratch:
        result = evaluate(model, suites(options), 0, Path(scratch) / "records", None, watch, options.batch_items)
    profile.disable()
    standard = sum(
        seconds * (STANDARD[name] / watch.items[name] if name in STANDARD else 1.0)
        for name, seconds in watch.seconds.items()
    )
    for name, seconds in watch.seconds.items():
        print(f"{name:14} {watch.items[name]:5} items {seconds:8.1f} s {seconds / watch.items[name]:8.3f} s an item")
    whole = sum(watch.seconds.values())
    is_standard = all(watch.items.get(name) == count for name, count in STANDARD.items()) and not options.windows
    what = "measured" if is_standard else "in proportion, of the suites asked"
    print(f"load {load_s:.1f} s, suites {whole:.1f} s; the standard gate {standard:.0f} s ({what}) of {LIMIT_S} s")
    if options.write:
        head = f"{Path(options.model).name}; {machine_line(describe_machine())} {options.threads} threads."
        ended = f"The model was loaded in {load_s:.0f} s; the whole gate took {standard:.0f} s ({what}) of {LIMIT_S}."
        rows = [f"| `{name}` | {watch.items[name]} | {seconds:.0f} |" for name, seconds in watch.seconds.items()]
        table = "\n".join([head, ended, "", "| suite | items | seconds |", "|---|---|---|", *rows])
        write_between_marks("GATE.md", "bench_gate.py", table)
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)
    document = {
        "seconds": {name: round(seconds, 2) for name, seconds in watch.seconds.items()},
        "items": watch.items,
        "load_s": round(load_s, 2),
        "standard_s": round(standard, 1),
        "is_measured": is_standard,
        "model": result["model"],
        "engine": result["engine"],
        "machine": describe_machine(),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
