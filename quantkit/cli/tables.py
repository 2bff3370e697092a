"""Tables for a terminal: several candidates side by side, and what a gate can detect."""

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.cli.output import number, size, table


def comparison_lines(comparison: Mapping[str, Any]) -> list[str]:
    """A row a model, best known trade-offs marked, and the reason of every verdict that is no pass."""
    rows, suites = [comparison["baseline"], *comparison["candidates"]], comparison["suites"]
    header = ("", "records", "scheme", "weights", "quality", *suites, "KL", "speed", "verdict")
    cells = [
        (
            "*" if row["on_front"] else "",
            row["folder"],
            row["scheme"] or "original",
            "-" if row["weight_bytes"] is None else size(row["weight_bytes"]),
            _percent(row["quality"]),
            *(_percent(row["scores"][suite]) for suite in suites),
            number(row["kl_mean_nats"]),
            "-" if row["speed_ratio"] is None else f"x{number(row['speed_ratio'])}",
            row["verdict"] or "baseline",
        )
        for row in rows
    ]
    note = "* nothing else here is as small, as good and as fast (by the measured values; small differences are chance)"
    reasons = [f"{row['folder']}: {row['reason']}" for row in rows if row["verdict"] in ("fail", "inconclusive")]
    return [*table(cells, header), note, *reasons]


def power_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a suite and share of flips."""
    header = (
        "suite",
        "items",
        "answers that change",
        "smallest drop shown",
        "margin",
        "a lossless one passes",
        "items for 80 %",
    )
    cells = [
        (
            row["suite"],
            row["num_items"],
            _percent(row["discordance"]),
            "none" if row["detectable_drop_pp"] is None else f"{row['detectable_drop_pp']:.1f} pp",
            "-" if row["margin_pp"] is None else f"{row['margin_pp']:g} pp",
            _percent(row["pass_probability"]),
            "-" if row["items_to_pass"] is None else row["items_to_pass"],
        )
        for row in rows
    ]
    return table(cells, header)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
