"""Several candidates as a page: one table, and quality over size with the front marked."""

from collections.abc import Sequence

from quantkit_eval.record_types import Comparison, ComparisonRow
from quantkit_eval.report.curves import Axis, Dot, Series, chart
from quantkit_eval.report.gates import OUTCOME_WORDS, title
from quantkit_eval.report.page import Page, PageSection, Table, render_page
from quantkit_eval.report.quantities import MISSING, instant, number, percent, ratio, size
from quantkit_eval.report.sections import NARROW, WIDE, Plot

MEGA = 1e6
_FRONT = (
    "On the front is what nothing else here beats in size, quality and, where it is known of all, speed. It goes by "
    "measured values: differences within the intervals of the verdicts are chance. Quality is the mean over the suites."
)


def render_comparison(comparison: Comparison) -> str:
    """The page of comparison.json. The same record gives the same page."""
    rows = [comparison["baseline"], *comparison["candidates"]]
    names = row_names(rows)
    plots = tuple(filter(None, (_front_plot(rows, names), _speed_plot(rows, names))))
    why = [
        f"{name}: {OUTCOME_WORDS[row['verdict']]}. {row['reason']}"
        for name, row in zip(names, rows, strict=True)
        if row["verdict"] is not None
    ]
    page = Page(
        title="comparison",
        headline=headline(comparison),
        created=comparison["created"],
        when=instant(comparison["created"]),
        source="comparison.json",
        sections=[
            PageSection("candidates", "Side by side", (_FRONT,), plots, (_table(comparison, rows, names),)),
            PageSection("verdicts", "Verdicts", why, (), (_gate_table(comparison),)),
            PageSection("records", "Records", (), (), (_record_table(rows, names),)),
        ],
    )
    return render_page(page)


def row_names(rows: Sequence[ComparisonRow]) -> list[str]:
    """The scheme of each model, with the folder of its records where two are alike."""
    names = [row["scheme"] or "original" for row in rows]
    folders = [row["folder"].rstrip("/").rpartition("/")[2] for row in rows]
    return [
        name if names.count(name) == 1 else f"{name}, {folder}" for name, folder in zip(names, folders, strict=True)
    ]


def headline(comparison: Comparison) -> str:
    """How many passed, in a sentence."""
    found = [row["verdict"] for row in comparison["candidates"]]
    words = {"pass": "pass", "fail": "fail", "inconclusive": "undecided"}
    parts = [f"{sum(one == outcome for one in found)} {word}" for outcome, word in words.items() if outcome in found]
    count = len(comparison["candidates"])
    return f"{number(count)} {'candidate' if count == 1 else 'candidates'}: {', '.join(parts)}."


def _front_plot(rows: Sequence[ComparisonRow], names: Sequence[str]) -> Plot | None:
    """Quality over the size of the weights."""
    known = [
        (row, name) for row, name in zip(rows, names, strict=True) if row["weight_bytes"] and row["quality"] is not None
    ]
    if not known:
        return None
    front = [row for row, _ in known if row["on_front"]]
    dots = {is_on: [_dot(row, name) for row, name in known if row["on_front"] is is_on] for is_on in (True, False)}
    series = [Series("on the front", dots[True], is_line=False, tone=1)] if front else []
    if dots[False]:
        series.append(Series("beaten by another", dots[False], is_line=False, tone=0))
    said = [f"{name}: {percent(row['quality'])} at {size(row['weight_bytes'])}" for row, name in known]
    return _plot("Quality over size", _FRONT_CAPTION, said, series, Axis("megabytes of weights"), "front")


_FRONT_CAPTION = "Up and to the left is better. Speed, where it was measured, stands in brackets."


def _dot(row: ComparisonRow, name: str) -> Dot:
    speed = f" ({ratio(row['speed_ratio'])})" if row["speed_ratio"] is not None else ""
    return Dot(float(row["weight_bytes"] or 0) / MEGA, 100 * float(row["quality"] or 0), label=f"{name}{speed}")


def _speed_plot(rows: Sequence[ComparisonRow], names: Sequence[str]) -> Plot | None:
    """Quality over speed, if the speed of every candidate is known."""
    if any(row["speed_ratio"] is None for row in rows[1:]) or any(row["quality"] is None for row in rows):
        return None
    speeds = [1.0, *(float(row["speed_ratio"] or 0) for row in rows[1:])]
    dots = [
        Dot(speed, 100 * float(row["quality"] or 0), label=name)
        for speed, row, name in zip(speeds, rows, names, strict=True)
    ]
    said = [f"{dot.label}: {number(dot.y)}% at {ratio(dot.x)}" for dot in dots]
    caption = "Decoding a single request, over the baseline's speed. Up and to the right is better."
    return _plot(
        "Quality over speed",
        caption,
        said,
        [Series("models", dots, is_line=False, tone=1)],
        Axis("speed over the baseline's"),
        "speed",
    )


def _plot(title_: str, caption: str, said: Sequence[str], series: Sequence[Series], x: Axis, key: str) -> Plot:
    y = Axis("quality, % of answers right")
    drawn = [chart(title_, ". ".join(said) + ".", series, x, y, f"{key}-{width}", width) for width in (WIDE, NARROW)]
    return Plot(title_, caption, *drawn)


def _table(comparison: Comparison, rows: Sequence[ComparisonRow], names: Sequence[str]) -> Table:
    suites = comparison["suites"]
    cells = [
        (
            name,
            "baseline" if row["verdict"] is None else OUTCOME_WORDS[row["verdict"]],
            "yes" if row["on_front"] else "no",
            size(row["weight_bytes"]),
            percent(row["quality"]),
            *(percent(row["scores"][suite]) for suite in suites),
            number(row["kl_mean_nats"]),
            MISSING if row["speed_ratio"] is None else ratio(row["speed_ratio"]),
        )
        for row, name in zip(rows, names, strict=True)
    ]
    header = ("Model", "Verdict", "On the front", "Weights", "Quality", *map(title, suites), "KL, nats", "Speed")
    return Table("All models side by side", header, cells, numbers_from=3)


def _gate_table(comparison: Comparison) -> Table:
    """A row a gate, a column a candidate."""
    names = row_names([comparison["baseline"], *comparison["candidates"]])[1:]
    gates = dict.fromkeys(gate for row in comparison["candidates"] for gate in row["gates"])
    rows = [
        (
            gate,
            *(
                OUTCOME_WORDS[row["gates"][gate]] if gate in row["gates"] else MISSING
                for row in comparison["candidates"]
            ),
        )
        for gate in gates
    ]
    return Table("Verdict of every gate", ("Gate", *names), rows, numbers_from=1 + len(names))


def _record_table(rows: Sequence[ComparisonRow], names: Sequence[str]) -> Table:
    cells = [
        (name, row["folder"], row["name"], row["checkpoint_hash"] or MISSING)
        for row, name in zip(rows, names, strict=True)
    ]
    return Table("Where each row comes from", ("Model", "Records", "Name", "Hash"), cells, numbers_from=4)
