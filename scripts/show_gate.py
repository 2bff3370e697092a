#!/usr/bin/env python3
"""Show what the gate catches: a damaged checkpoint, a sound one, and a model against itself.

    scripts/show_gate.py MODEL [--items 300] [--windows 0] [--seeds 10] [--seed-items 100] [--layer NAME]
                         [--factor 1.05] [--max-kl 0.1] [--max-drift 0.001] [--recipe w8a8] [--folder DIR] [--write]

MODEL is quantized by the recipe, a built-in name or a file, and judged against MODEL on ``extract``, ``schema`` and
``nll``. A copy with the scales of one layer multiplied by 1.05 is judged against the records of the sound checkpoint,
as a new build is against the last release: beside what the quantization itself changes, such damage does not show
against MODEL. The sound checkpoint asked again, in other batches, is the control. Then MODEL is evaluated twice for
each of ten seeds of the items, with 64 and with 7 items at a time, and judged against itself. The sound checkpoint has
to pass, the damaged one must not, and no A/A may fail.

The power table says what the suites can detect at the share of flips that was seen. ``--write`` puts the tables into
docs/GATE.md between its marks, with the machine and the item counts. The exit code is 1 if one of these is not so.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from marked_page import machine_line, write_between_marks
from quantkit.gate import engine_config
from quantkit.pipeline import quantize_model
from quantkit.recipe import load_recipe
from quantkit.serve import Engine
from quantkit.source import open_source
from quantkit.text_model import EngineTextModel
from quantkit_eval.compare import compare
from quantkit_eval.evaluate import evaluate
from quantkit_eval.machine import describe_machine
from quantkit_eval.power import power_table
from quantkit_eval.record_types import Verdict

SUITES = ("extract", "schema")
MARGINS_PP = {"extract": 5.0, "schema": 5.0}
LAYER = "model.layers.0.mlp.down_proj"


@dataclass
class Case:
    """A comparison with what it has to end in."""

    name: str
    wanted: tuple[str, ...]
    verdict: Verdict

    @property
    def is_as_wanted(self) -> bool:
        """Whether the gate does what it is for."""
        return self.verdict["verdict"] in self.wanted


@dataclass
class Shown:
    """What was found, and how long it took."""

    cases: list[Case] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    taken_over: int = 0  # evaluations that an earlier run in the same folder did


def make_checkpoints(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The recipe's checkpoint, and its copy with one layer's scales multiplied."""
    sound, damaged = folder / "sound-checkpoint", folder / "damaged-checkpoint"
    if not (sound / "quantkit.json").exists():
        recipe = load_recipe(options.recipe).with_model(str(Path(options.model).resolve()))
        output = recipe.checkpoints[0].model_copy(update={"path": sound})
        quantize_model(recipe.model_copy(update={"outputs": (output,)}))
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(sound, damaged)
    wanted = f"{options.layer}.weight_scale"
    for path in sorted(damaged.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata()
        if wanted in tensors:
            tensors[wanted] = tensors[wanted] * options.factor
            save_file(tensors, path, metadata=metadata)
            return {"sound": sound, "damaged": damaged}
    sys.exit(f"{sound} has no tensor {wanted}; give --layer one of its linear layers")


def ask(model: EngineTextModel, suites: dict[str, dict[str, int]], seed: int, out: Path, **more: Any) -> Path:
    """Records of a model; another run's in the same folder are taken over, so that a long show can go on."""
    if not (out / "result.json").exists():
        evaluate(model, suites, seed, out, **more)
    return out


def count_records(folder: Path) -> int:
    """Evaluations that are there before the show begins."""
    return sum(1 for _ in folder.rglob("result.json"))


def open_model(path: str | Path) -> EngineTextModel:
    """The engine as the gate sets it up."""
    source = open_source(path)
    return EngineTextModel(Engine(source, engine_config(source)))


def show(options: argparse.Namespace, folder: Path) -> Shown:
    """Judge the two checkpoints and the model against itself."""
    found, clock = Shown(taken_over=count_records(folder)), time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        found.seconds[name] = now - clock
        clock = now
        print(f"{name}: {found.seconds[name]:.0f} s", file=sys.stderr)

    paths = make_checkpoints(options, folder)
    lap("checkpoints")
    suites = {name: {"num_items": options.items} for name in SUITES} | {"nll": {"max_windows": options.windows}}
    gates = {"suites": list(suites), "max_drop_pp": MARGINS_PP, "max_kl_mean_nats": options.max_kl}
    original = open_model(options.model)
    baseline = ask(original, suites, 0, folder / "baseline")
    lap("original")
    sound = open_model(paths["sound"])
    records = ask(sound, suites, 0, folder / "sound", reference=baseline)
    found.cases.append(Case("sound", ("pass",), compare(baseline, records, gates)))
    lap("sound")
    release = ask(sound, suites, 0, folder / "release")
    drift = gates | {"max_kl_mean_nats": options.max_drift}
    for name, model, wanted in (
        ("again", sound, ("pass",)),
        ("damaged", open_model(paths["damaged"]), ("fail", "inconclusive")),
    ):
        records = ask(model, suites, 0, folder / name, reference=release, batch_items=7)
        found.cases.append(Case(name, wanted, compare(release, records, drift)))
        lap(name)
    few = {name: {"num_items": options.seed_items} for name in SUITES}
    margins = {"suites": list(few), "max_drop_pp": MARGINS_PP}
    for seed in range(options.seeds):
        first = ask(original, few, seed, folder / "aa" / f"{seed}-64")
        second = ask(original, few, seed, folder / "aa" / f"{seed}-7", batch_items=7)
        found.cases.append(Case(f"A/A, seed {seed}", ("pass", "inconclusive"), compare(first, second, margins)))
        lap(f"A/A {seed}")
    return found


def render(options: argparse.Namespace, found: Shown) -> str:
    """The tables as Markdown."""
    machine = describe_machine()
    earlier = f", beside {found.taken_over} evaluations of an earlier run." if found.taken_over else "."
    about = (
        f"{Path(options.model).name}; {machine_line(machine)} {torch.get_num_threads()} threads; {options.items} items "
        f"a suite, {options.seed_items} for each of {options.seeds} seeds; {sum(found.seconds.values()):.0f} s{earlier}"
    )
    rows = ["| compared | gate | before → after | interval | verdict |", "|---|---|---|---|---|"]
    names = {
        "sound": f"`{Path(options.recipe).stem}` against the original",
        "again": "the same checkpoint again, against its own records",
        "damaged": f"its copy, against the same records, scales of `{options.layer}` times {options.factor:g}",
    }
    for case in found.cases:
        if case.name not in names:
            continue
        for gate in case.verdict["gates"]:
            rows.append(
                f"| {names[case.name]} | `{gate['name']}` | {_levels(gate)} | {_interval(gate)} | {_end(gate)} |"
            )
        rows.append(f"| {names[case.name]} | **all** | | | **{case.verdict['verdict']}** |")
    pairs = [case for case in found.cases if case.name.startswith("A/A")]
    counts = {word: sum(case.verdict["verdict"] == word for case in pairs) for word in ("pass", "inconclusive", "fail")}
    flips = sum(entry["improved"] + entry["regressed"] for case in pairs for entry in case.verdict["changes"])
    asked = sum(entry["n"] for case in pairs for entry in case.verdict["changes"])
    aa = (
        f"The model against itself, {len(pairs)} seeds: {counts['pass']} pass, {counts['inconclusive']} inconclusive, "
        f"{counts['fail']} fail; {flips} of {asked} items flipped."
    )
    return "\n".join([about, "", *rows, "", aa, "", *_power(options, found)])


def _levels(gate: Any) -> str:
    if gate["kind"] == "upper_bound":
        return f"{gate['value']:.4g} {gate['unit'].replace('_', ' ')}"
    return f"{100 * gate['baseline']:.1f} % → {100 * gate['candidate']:.1f} %"


def _interval(gate: Any) -> str:
    if gate["interval"] is None:
        return "none"
    scale, digits = (1.0, ".4g") if gate["kind"] == "upper_bound" else (100.0, ".1f")
    low, high = (format(scale * end, digits) for end in gate["interval"])
    return f"{low} to {high}; limit {scale * gate['limit']:g}"


def _end(gate: Any) -> str:
    needed = f", about {gate['items_needed']} items would decide" if gate["items_needed"] else ""
    return f"{gate['verdict']}{needed}"


def _power(options: argparse.Namespace, found: Shown) -> list[str]:
    """What the suites can detect at the share of flips that the damaged checkpoint had."""
    damaged = next(case.verdict for case in found.cases if case.name == "damaged")
    lines = ["| suite | items | flips seen | finds a drop of (80 %) | passes if nothing is lost | items for 80 % |"]
    lines.append("|---|---|---|---|---|---|")
    for entry in damaged["changes"]:
        share = max((entry["improved"] + entry["regressed"]) / entry["n"], 1 / entry["n"])
        suites = {entry["suite"]: {"num_items": options.items}}
        margins = {name: margin for name, margin in MARGINS_PP.items() if name == entry["suite"]}
        (row,) = power_table(suites, margins, (share,))
        drop = "none" if row["detectable_drop_pp"] is None else f"{row['detectable_drop_pp']:.1f} pp"
        passes = "-" if row["pass_probability"] is None else f"{100 * row['pass_probability']:.0f} %"
        cells = (f"`{row['suite']}`", row["num_items"], f"{100 * share:.1f} %", drop, passes, row["items_to_pass"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    """Show, print, write, and end with whether the gate did what it is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--items", type=int, default=300)
    parser.add_argument("--windows", type=int, default=0, help="of nll; 0 is the whole text")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seed-items", type=int, default=100)
    parser.add_argument("--layer", default=LAYER)
    parser.add_argument("--factor", type=float, default=1.05)
    parser.add_argument("--max-kl", type=float, default=0.1, help="to the original, in nats")
    parser.add_argument("--max-drift", type=float, default=0.001, help="to the sound checkpoint's records, in nats")
    parser.add_argument("--recipe", default="w8a8", help="of the sound checkpoint: a built-in name or a file")
    parser.add_argument("--folder", type=Path, help="keep checkpoints and records, and take over those that are there")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/GATE.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = show(options, folder)
    text = render(options, found)
    print(text)
    if options.write:
        write_between_marks("GATE.md", "show_gate.py", text)
    wrong = [case.name for case in found.cases if not case.is_as_wanted]
    print(
        json.dumps({"seconds": found.seconds, "not_as_wanted": wrong, "machine": describe_machine()}), file=sys.stderr
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
