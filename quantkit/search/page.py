"""The result of a search as one HTML page that loads nothing."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quantkit.search.pareto import pareto_plot
from quantkit_eval.report.quantities import duration, number, percent, size


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a search.json."""
    style = files("quantkit.search").joinpath("templates", "search.css").read_text(encoding="utf-8")
    return (
        _environment()
        .get_template("search.html.j2")
        .render(
            style=Markup(style),
            document=document,
            winner=next((row for row in document["trials"] if row["name"] == document["winner"]), None),
            plot=pareto_plot(document["trials"], document["limits"]["max_kl_mean_nats"]),
            score_lines=score_lines,
            size=size,
            number=number,
            duration=duration,
        )
    )


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


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("quantkit.search", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
