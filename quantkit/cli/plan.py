"""``quantkit plan``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.output import emit, json_option, table
from quantkit.cli.sensitivity import refuse_sensitivity_options, sensitivity_options, show_sensitivity

if TYPE_CHECKING:
    from quantkit.capacity.devices import Device
    from quantkit.capacity.model_facts import ModelFacts
    from quantkit.capacity.planning import CapacityPlan, DevicePlan
    from quantkit.capacity.workload import Workload

COUNT = click.IntRange(min=1)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("plan")
@click.argument("model", required=False)
@click.option("--gpu", "gpus", metavar="NAME,...", help="Devices of the data file, such as H100-80GB,L40S.")
@click.option("--device", type=click.Choice(["cpu"]), help="Measure this machine's processor and plan for it.")
@click.option("--context", metavar="P50,P99", help="Tokens of a usual and a long sequence; 3/4 are prompt.")
@click.option("--prompt", metavar="P50,P99", help="Tokens of a usual and of a long prompt.")
@click.option("--output", metavar="P50,P99", help="Tokens of a usual and of a long answer.")
@click.option("--concurrency", type=COUNT, help="Sequences at the same time.")
@click.option("--tp", type=COUNT, help="Tensor-parallel devices.")
@click.option("--kv-dtype", default="16-bit", show_default=True, help="Of the KV cache: 16-bit, fp8 or int8.")
@click.option("--goal", type=click.Choice(["latency", "throughput"]), default="latency", show_default=True,
              help="What recipes are ranked by.")  # fmt: skip
@click.option("--shared-prefix", type=click.IntRange(min=0), default=0, help="Tokens that all prompts begin with.")
@click.option("--quality-critical", is_flag=True, help="Rank 16 and 8 bits before 4.")
@click.option("--prefix-caching", is_flag=True, help="The engine keeps the keys and values of prompts.")
@click.option("--check", type=FILE, metavar="RECIPE", help="Warn of known mistakes in a recipe and its deployment.")
@click.option("--write-recipe", type=FILE, help="Write the best recommended recipe that can be written today.")
@click.option("--trace", type=FILE, help="Replay a log of requests (JSON lines) through the engine's scheduler.")
@click.option("--html", type=FILE, help="Also write an HTML page with plots.")
@sensitivity_options
@json_option
def plan_command(
    model: str | None,
    sensitivity: bool,
    recipe: str | None,
    plot: Path | None,
    gpus: str | None,
    device: str | None,
    tp: int | None,
    kv_dtype: str,
    check: Path | None,
    write_recipe: Path | None,
    trace: Path | None,
    html: Path | None,
    as_json: bool,
    **workload_options: Any,
) -> None:
    """Plan the capacity for MODEL from its configuration: memory, what fits, speed, recipes. No weight is read.

    MODEL is a hub id, a folder, a .gguf file or a config.json; with --check it may come from the recipe.

    The exit code is 1 if nothing that is demanded runs on any of the devices.

    With --sensitivity weights are read, and calibration windows run through the model: minutes, not seconds.
    """
    if sensitivity:
        show_sensitivity(model, recipe, plot, as_json=as_json)
        return
    refuse_sensitivity_options(recipe, plot)
    from quantkit.capacity.fit import Demand
    from quantkit.capacity.kv_footprint import kv_dtype_named
    from quantkit.capacity.plan_text import plan_lines
    from quantkit.capacity.planning import make_capacity_plan
    from quantkit.capacity.read_facts import read_facts
    from quantkit.errors import UsageError

    checked = _recipe(check)
    name = model if model is not None else checked.require_model() if checked is not None else None
    if name is None:
        raise UsageError("no model", fix="Give MODEL, or --check RECIPE with a model in it")
    workload = _workload(workload_options)
    dtype = kv_dtype_named(kv_dtype)
    if gpus is None and device is None and (write_recipe or trace):
        raise UsageError("--write-recipe and --trace need a device", fix="Give --gpu NAME or --device cpu")
    facts = read_facts(name)
    devices = _devices(gpus, device, facts)
    demand = Demand(workload.context_p50, workload.context_p99, workload.concurrency, tp or 1)
    plan = make_capacity_plan(facts, devices, workload, demand, dtype, name)
    if checked is not None:
        plan.extra["findings"] = _findings(checked, plan, tp)
    advised = [found for found in plan.devices if found.advice]
    if trace is not None:
        plan.extra["trace"] = [_replay(plan, found, trace) for found in advised]
    if write_recipe is not None and plan.runs:
        _write_recipe((advised or plan.devices)[0], write_recipe)
    if html is not None:
        from quantkit.capacity.page import render_page

        html.write_text(render_page(plan), encoding="utf-8")
    emit(plan.to_dict(), plan_lines(plan, table), as_json=as_json)
    plan.raise_if_nothing_runs()


def _recipe(path: Path | None) -> Any:
    if path is None:
        return None
    from quantkit.recipe import load_recipe

    return load_recipe(path)


def _pair(text: str, option: str) -> tuple[int, int]:
    """``512,2048`` or ``512``."""
    from quantkit.errors import UsageError

    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} {text!r} is not P50,P99 in whole tokens of 1 or more")
    usual, long = int(parts[0]), int(parts[-1])
    if long < usual:
        raise UsageError(f"{option} {text!r}: P99 is less than P50", fix=f"Give {option} {long},{usual}")
    return usual, long


def _workload(options: dict[str, Any]) -> "Workload":
    from quantkit.capacity.workload import Workload
    from quantkit.errors import UsageError

    lengths: dict[str, int] = {}
    context = options.pop("context")
    if context is not None:
        if options["prompt"] or options["output"]:
            raise UsageError("--context is prompt and output together", fix="Give either --context, or the two others")
        for name, tokens in zip(("p50", "p99"), _pair(context, "--context"), strict=True):
            lengths[f"output_{name}"] = max(1, tokens // 4)
            lengths[f"prompt_{name}"] = max(1, tokens - tokens // 4)
    for kind in ("prompt", "output"):
        text = options.pop(kind)
        if text is not None:
            lengths[f"{kind}_p50"], lengths[f"{kind}_p99"] = _pair(text, f"--{kind}")
    settings: dict[str, Any] = {**lengths, **options}
    return Workload(**settings)


def _devices(gpus: str | None, device: str | None, facts: "ModelFacts") -> "list[Device]":
    from quantkit.capacity.devices import device_named, known_devices
    from quantkit.errors import UsageError

    names = [name for name in (gpus or "").split(",") if name.strip()]
    if gpus is not None and not names:
        raise UsageError("--gpu names no device", fix=f"Known are {', '.join(known_devices())}")
    found = list({device.name: device for device in map(device_named, names)}.values())
    if device == "cpu":
        from quantkit.capacity.measured_cpu import measure_cpu

        found.append(measure_cpu(facts))
    return found


def _findings(recipe: Any, plan: "CapacityPlan", tp: int | None) -> list[dict[str, Any]]:
    from quantkit.capacity.lint import check_recipe, recipe_scheme

    scheme = recipe_scheme(recipe)
    fits = tuple(fit for found in plan.devices for fit in found.fits if fit.scheme.partition(" ")[0] == scheme)
    found = check_recipe(recipe, plan.facts, workload=plan.workload, fits=fits, tp=tp)
    return [finding.to_dict() for finding in found]


def _replay(plan: "CapacityPlan", found: "DevicePlan", trace: Path) -> dict[str, Any]:
    from quantkit.capacity.replay import replay_trace
    from quantkit.capacity.simulation import settings_for
    from quantkit.capacity.trace import read_trace

    requests = read_trace(trace)
    best = found.advice[0]
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    settings = settings_for(plan.facts, best.fit, plan.kv_dtype, found.layout, plan.demand, longest)
    report = replay_trace(found.speeds[best.scheme], settings, requests)
    return {"device": found.device.name, "scheme": best.scheme, **report.to_dict()}


def _write_recipe(found: "DevicePlan", path: Path) -> None:
    from quantkit.capacity.advice import writable
    from quantkit.errors import UsageError
    from quantkit.formats.shards import write_text_durably

    best = writable(found.advice)
    assert best.recipe is not None, "writable() returns only advice with a recipe"
    if path.exists():
        raise UsageError(f"{path} exists", fix="Choose another path for --write-recipe")
    write_text_durably(path, best.recipe)
    click.echo(f"quantkit: wrote the recipe for {best.scheme} to {path}", err=True)
    for entry in found.advice:
        if entry is best:
            break
        click.echo(f"quantkit: {entry.scheme} ranks higher; {entry.left_out[0]}", err=True)
    for line in best.left_out:
        click.echo(f"quantkit: left out: {line}", err=True)
