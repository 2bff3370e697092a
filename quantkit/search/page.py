"""The result of a search as one HTML page that loads nothing."""

from collections.abc import Mapping
from typing import Any

from quantkit.search.pareto import SPEED, pareto_plot
from quantkit_eval.report.plain_page import render_plain_page
from quantkit_eval.report.quantities import duration, number, percent, size


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a search.json."""
    limit = document["limits"]["max_kl_mean_nats"]
    return render_plain_page(
        "quantkit.search",
        "search",
        document=document,
        winner=next((row for row in document["trials"] if row["name"] == document["winner"]), None),
        size_plot=pareto_plot(document["trials"], limit),
        speed_plot=pareto_plot(document["trials"], limit, SPEED),
        score_lines=score_lines,
        speed_text=speed_text,
        size=size,
        number=number,
        duration=duration,
    )


def speed_text(row: Mapping[str, Any]) -> str:
    """The planned speed of a candidate, and the measured ones of a certification whose gates ask for speed."""
    planned = row.get("planned_tokens_per_s")
    texts = [row.get("planned_speed_note", "\u2013") if planned is None else f"{planned:,.0f} planned"]
    for gate in row.get("certified", {}).get("gates", ()):
        if gate["suite"] == "throughput" and gate["candidate"] is not None:
            texts.append(f"{gate['candidate']:,.0f} measured here, {gate['name'].partition('.')[2]}")
    return "; ".join(texts)


def score_lines(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Of each limit: what it is about, the selection score and the certified score."""
    certified = {gate["name"].partition(".")[0]: gate for gate in row.get("certified", {}).get("gates", ())}
    lines = []
    for name, score in row["scores"].items():
        is_kl = name == "kl_mean_nats"
        gate = certified.get("nll" if is_kl else name)
        lines.append((name, _score(score, is_kl), _score(gate, is_kl) if gate else "\u2013"))
    return lines


def _score(score: Mapping[str, Any], is_kl: bool) -> str:
    if is_kl:
        return f"{number(score['candidate'])} nats on {score['n']} windows"
    return f"{percent(score['baseline'])} \u2192 {percent(score['candidate'])} of {score['n']}"
