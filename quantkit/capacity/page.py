"""A capacity plan as one HTML page that loads nothing."""

from typing import Any

from markupsafe import Markup

from quantkit.capacity.kv_footprint import KV_DTYPES, sequence_bytes
from quantkit.capacity.plan_plots import Series, bar_plot, line_plot
from quantkit.capacity.plan_text import UNCONFIRMED, crossover_lines, fit_cells, fit_legend, gigabytes, trace_lines
from quantkit.capacity.planning import CapacityPlan, DevicePlan, launch_lines
from quantkit_eval.report.frame import Axis
from quantkit_eval.report.plain_page import render_plain_page

DEFAULT_LENGTH = 32768  # tokens up to which the cache is drawn if the model does not say its own


def render_page(plan: CapacityPlan) -> str:
    """The page."""
    document = plan.to_dict()
    weights = [
        (row["scheme"], float(row["bytes"]), gigabytes(row["bytes"]))
        for row in document["footprint"]["weights"]
        if row["bytes"] is not None
    ]
    return render_plain_page(
        "quantkit.capacity",
        "plan",
        model=document["model"],
        weights_plot=bar_plot("weights", "Weights by scheme", weights),
        kv_plot=_kv_plot(plan),
        devices=[_device(plan, device, index) for index, device in enumerate(plan.devices)],
        findings=document.get("findings"),
        traces=[_trace(trace, index) for index, trace in enumerate(document.get("trace", ()))],
        fit_legend=fit_legend(plan),
        assumptions=document["assumptions"],
    )


def _kv_plot(plan: CapacityPlan) -> Markup:
    """Bytes of a sequence by its length."""
    most = plan.facts.max_model_len or DEFAULT_LENGTH
    lengths = [1 << power for power in range(6, 24) if 1 << power <= most] or [most]
    series = [
        Series(name, tuple((float(tokens), float(sequence_bytes(plan.facts, tokens, dtype))) for tokens in lengths))
        for name, dtype in KV_DTYPES.items()
    ]
    return line_plot(
        "kv", "KV cache of a sequence by its length", series, Axis("tokens", _count), Axis("bytes", gigabytes)
    )


def _device(plan: CapacityPlan, device: DevicePlan, index: int) -> dict[str, Any]:
    context = plan.workload.prompt_p50 + plan.workload.output_p50 // 2
    series = [
        Series(
            name, tuple((float(batch), batch / model.decode(batch, context).total) for batch in device.batches(name))
        )
        for name, model in device.speeds.items()
    ]
    found = device.crossovers
    marks = [
        ("16-bit is compute-bound", found.sixteen_compute_bound),
        ("W4A16 stops helping", found.weight_only_stops_helping),
        ("W8A8 beats W4A16", found.int8_beats_weight_only),
    ]
    markers = [(name, float(value)) for name, value in marks if value is not None]
    sixteen = device.speeds.get("16-bit")
    relative = [
        Series(
            name,
            tuple(
                (float(batch), sixteen.decode(batch, context).total / model.decode(batch, context).total)
                for batch in device.batches(name)
            ),
        )
        for name, model in device.speeds.items()
        if sixteen is not None
    ]
    title = f"Decoding on {device.device.name} at {context} tokens of context"
    return {
        "name": device.device.name,
        "source": device.device.source,
        "note": None if device.device.is_confirmed else UNCONFIRMED,
        "fits": [(fit, fit_cells(fit)) for fit in device.fits],
        "obstacle": device.obstacle,
        "speed_plot": line_plot(
            f"speed-{index}", title, series, Axis("batch", _count), Axis("tokens/s", _count), markers
        ),
        "relative_plot": line_plot(
            f"relative-{index}",
            f"Times as fast as 16 bits on {device.device.name}",
            relative,
            Axis("batch", _count),
            Axis("times as fast as 16 bits", _count),
            markers,
        ),
        "crossovers": crossover_lines(device),
        "advice": device.advice,
        "settings": device.settings,
        "launch": launch_lines(plan, device, device.best),
    }


def _trace(trace: dict[str, Any], index: int) -> dict[str, Any]:
    curve = trace["curve"]
    series = [
        Series(
            f"TTFT {q}",
            tuple((p["requests_per_s"], p[f"ttft_{q}_s"]) for p in curve if p[f"ttft_{q}_s"] > 0),
        )
        for q in ("p50", "p99")
    ]
    plot = line_plot(
        f"trace-{index}",
        "Time to the first token by load",
        series,
        Axis("requests/s", _count),
        Axis("seconds", _count),
        [("saturation", trace["saturation_requests_per_s"])],
    )
    lines = list(trace_lines(trace, lambda *_args, **_kwargs: []))
    return {"device": trace["device"], "scheme": trace["scheme"], "lines": lines, "plot": plot}


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
