"""A capacity plan as lines for a person."""

from collections.abc import Callable, Iterator
from typing import Any

from quantkit.capacity.advice import UNCERTAINTY
from quantkit.capacity.fit import Fit
from quantkit.capacity.planning import CapacityPlan, DevicePlan, launch_lines

Table = Callable[..., list[str]]
DASH = "-"
SHOWN_BATCHES = (1, 16, 64, 256)
UNCONFIRMED = "not every figure of this device could be confirmed by the vendor's data sheet"


def plan_lines(plan: CapacityPlan, table: Table) -> Iterator[str]:
    """The plan, section by section.

    Args:
        plan: what to say.
        table: aligns rows under a header.
    """
    document = plan.to_dict()
    yield from _model_lines(plan)
    yield ""
    yield from _weight_lines(document["footprint"], table)
    yield ""
    yield from _kv_lines(document, table)
    if not plan.devices:
        yield "  --gpu NAME,... adds what fits and how fast it is, on an L4 for one; --device cpu measures this machine"
    for device in plan.devices:
        yield ""
        yield from _device_lines(plan, device, table)
    for finding in document.get("findings", ()):
        yield f"warning {finding['name']}: {finding['message']}; {finding['fix']}"
    if "findings" in document and not document["findings"]:
        yield "no known mistake found in the recipe"
    for trace in document.get("trace", ()):
        yield ""
        yield from trace_lines(trace, table)
    if plan.devices:
        yield ""
        yield "assumptions:"
        yield from (f"  {line}" for line in document["assumptions"])


def _model_lines(plan: CapacityPlan) -> Iterator[str]:
    facts = plan.facts
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts.to_dict()["layers_by_kind"].items())
    experts = f", {facts.num_experts} experts ({facts.experts_per_token} a token)" if facts.num_experts else ""
    count = f"{facts.parameters:,}" if facts.weights else "an unknown number of"
    yield f"{facts.name}: {facts.model_type}, {count} parameters (from {facts.counted_from})"
    yield f"  {facts.num_layers} layers ({kinds}){experts}, at most {facts.max_model_len or 'unknown'} tokens"
    if facts.quantization:
        yield f"  stored as {facts.quantization}"
    for note in facts.notes:
        yield f"  note: {note}"


def _weight_lines(footprint: dict[str, Any], table: Table) -> Iterator[str]:
    rows = []
    if footprint["stored_bytes"] is not None:
        rows.append(("its files", gigabytes(footprint["stored_bytes"]), DASH, ""))
    for row in footprint["weights"]:
        bits = DASH if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.2f}"
        rows.append((row["scheme"], gigabytes(row["bytes"]), bits, row["problem"] or ""))
    yield from table(rows, header=("weights", "size", "bits/weight", ""))


def _kv_lines(document: dict[str, Any], table: Table) -> Iterator[str]:
    workload, kv = document["workload"], document["footprint"]["kv"]
    p50 = workload["prompt_p50"] + workload["output_p50"]
    p99 = workload["prompt_p99"] + workload["output_p99"]
    rows = []
    for name, engines in kv.items():
        for engine, sizes in engines.items():
            if engine != "vLLM" and sizes == engines["vLLM"]:
                continue
            token = f"{sizes['bytes_per_token'] / 1024:.1f} KiB"
            rows.append((name, engine, token, gigabytes(sizes["bytes_p50"]), gigabytes(sizes["bytes_p99"])))
    yield from table(rows, header=("KV cache", "engine", "a token", f"{p50} tokens", f"{p99} tokens"))
    wasted = document["footprint"]["waste"]
    yield (
        f"  a sequence of {p50} tokens leaves {wasted['reserved_p99_for_p50']:.1%} of room for {p99} unused, "
        f"of blocks of 16 tokens {wasted['blocks_of_16']:.2%}"
    )


def _device_lines(plan: CapacityPlan, device: DevicePlan, table: Table) -> Iterator[str]:
    times = f"{plan.demand.tp} x " if plan.demand.tp > 1 else ""
    yield f"{times}{device.device.name} ({gigabytes(device.device.memory_bytes)}; {device.device.source})"
    if not device.device.is_confirmed:
        yield f"  note: {UNCONFIRMED}"
    rows = [
        (
            fit.scheme,
            fit.answer,
            *fit_cells(fit),
            fit.problem or "",
        )
        for fit in device.fits
    ]
    header = ("  scheme", "fits", "weights", "at p50", "at p99", "longest", "util", "max len", "")
    yield from table([(f"  {row[0]}", *row[1:]) for row in rows], header=header)
    yield f"  {fit_legend(plan)}"
    if device.obstacle is not None:
        yield f"  nothing that was demanded runs here: {device.obstacle}; {device.obstacle.fix}"
        return
    yield from _speed_lines(plan, device, table)
    if device.advice:
        yield f"  recipes, the best first (within {UNCERTAINTY:g}x of the fastest the least loss of quality):"
    for number, advice in enumerate(device.advice, 1):
        yield f"    {number}. {advice.scheme}: {advice.reason} [{advice.request_seconds:.2f} s a request]"
    for setting in device.settings:
        yield f"  setting: {setting.name}: {setting.reason}"
    for engine, line in launch_lines(plan, device, device.best).items():
        yield f"  {engine}: {line}"


def fit_cells(fit: Fit) -> tuple[str, ...]:
    """The numbers of a fit in the order of its table; dashes where nothing could be weighed."""
    if not fit.weight_bytes:
        return (DASH,) * 6
    counts = (fit.batch_p50, fit.batch_p99, fit.longest)
    return (gigabytes(fit.weight_bytes), *map(str, counts), f"{fit.utilization:.2f}", str(fit.max_model_len or DASH))


def fit_legend(plan: CapacityPlan) -> str:
    """What the columns of the table of fits say."""
    usual, long = plan.demand.context_p50, plan.demand.context_p99
    return (
        f"at p50, at p99: how many sequences of {usual} and of {long} tokens fit at once; "
        "longest: tokens of the longest that fits alone"
    )


def _speed_lines(plan: CapacityPlan, device: DevicePlan, table: Table) -> Iterator[str]:
    context = plan.workload.prompt_p50 + plan.workload.output_p50 // 2
    rows = []
    for name, speed in device.speeds.items():
        steps = {batch: speed.decode(batch, context) for batch in device.batches(name)}
        cells = [f"{b / steps[b].total:.0f} ({steps[b].bound})" if b in steps else DASH for b in SHOWN_BATCHES]
        rows.append((f"  {name}", *cells, f"{1e3 * speed.prefill(plan.workload.prompt_p50):.0f} ms"))
    header = ("  tok/s at batch", *map(str, SHOWN_BATCHES), f"prompt of {plan.workload.prompt_p50}")
    yield from table(rows, header=header)
    yield from (f"  {line}" for line in crossover_lines(device))


def crossover_lines(device: DevicePlan) -> list[str]:
    """Where decoding changes its nature, a line each."""
    found = device.crossovers
    lines = []
    if found.sixteen_compute_bound is not None:
        lines.append(f"16-bit decoding is memory-bound below batch {found.sixteen_compute_bound}")
    if found.weight_only_gain_at_one is not None:
        stops = found.weight_only_stops_helping
        until = "at every batch tried" if stops is None else f"and stops helping from batch {stops}"
        lines.append(f"W4A16 is {found.weight_only_gain_at_one:.2f}x as fast at batch 1 {until}")
    if found.int8_beats_weight_only is not None:
        lines.append(f"W8A8 is faster than W4A16 from batch {found.int8_beats_weight_only}")
    return lines


def trace_lines(trace: dict[str, Any], table: Table) -> Iterator[str]:
    """The replay of a log."""
    replay = trace["replay"]
    offered = trace["offered_requests_per_s"]
    rate = "no arrival times" if offered is None else f"{offered:.2f} requests/s"
    yield f"trace on {trace['device']} with {trace['scheme']}: {trace['requests']} requests, {rate}"
    yield (
        f"  TTFT p50 {replay['ttft_p50_s']:.3f} s, p99 {replay['ttft_p99_s']:.3f} s; "
        f"ITL p50 {1e3 * replay['itl_p50_s']:.1f} ms, p99 {1e3 * replay['itl_p99_s']:.1f} ms"
    )
    possible = trace["possible_hit_rate"]
    hits = "unknown" if possible is None else f"{possible:.1%}"
    yield (
        f"  {replay['preemptions']} preemptions, at most {replay['busiest']} at once, {replay['refused']} refused; "
        f"prefix cache hits {replay['hit_rate']:.1%} (an unlimited one: {hits})"
    )
    yield f"  saturates at {trace['saturation_requests_per_s']:.2f} requests/s"
    rows = []
    for point in trace["curve"]:
        seconds = [f"{point[name]:.3f}" for name in ("ttft_p50_s", "ttft_p99_s")]
        rows.append((f"  {point['requests_per_s']:.2f}", *seconds, f"{1e3 * point['itl_p99_s']:.1f}"))
    yield from table(rows, header=("  requests/s", "TTFT p50 s", "p99 s", "ITL p99 ms"))
    yield from (f"  note: {note}" for note in trace["notes"])


def gigabytes(nbytes: float | None) -> str:
    """Decimal units, as data sheets and files are measured."""
    if nbytes is None:
        return DASH
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
