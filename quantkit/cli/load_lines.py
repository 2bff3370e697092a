"""A load for a terminal: memory, rates and latencies, and where a candidate falls behind."""

from statistics import median
from typing import TYPE_CHECKING

from quantkit.cli.output import interval, number, size, table

if TYPE_CHECKING:
    from quantkit_eval.record_types import Load


def load_lines(load: "Load") -> list[str]:
    """A row a model with its memory, a row a point and model, a line a crossover."""
    from quantkit_eval.report.load_page import crossover_lines, model_names

    names = model_names(load)
    contexts = list(load["memory"][0]["concurrency"])
    memory = [
        (
            name,
            size(own["weight_bytes"]),
            size(own["kv_bytes_per_token"]),
            *("-" if own["concurrency"][context] is None else own["concurrency"][context] for context in contexts),
        )
        for name, own in zip(names, load["memory"], strict=True)
    ]
    fits = [f"fit at {context}" for context in contexts]
    rows = []
    for point in load["points"]:
        at = f"{point['batch']} at once" if point["batch"] else f"{point['qps']:g} a second"
        for index, runs in enumerate(point["runs"]):
            ratio = point["ratios"][index - 1] if index and point["ratios"] else None
            rows.append(
                (
                    point["context"],
                    at,
                    names[index],
                    number(median(runs["tok_per_s"])),
                    number(runs["ttft_ms"]["p50"]),
                    number(runs["ttft_ms"]["p99"]),
                    number(runs["itl_ms"]["p50"]),
                    number(runs["itl_ms"]["p99"]),
                    number(ratio["value"]) if ratio else "",
                    interval(ratio["interval"]) if ratio else "",
                )
            )
    header = ("prompt", "load", "model", "tok/s", "TTFT ms", "p99", "ITL ms", "p99", "ratio", "interval")
    return [
        *table(memory, ("model", "weights", "cache a token", *fits)),
        "",
        *table(rows, header),
        *crossover_lines(load),
    ]
