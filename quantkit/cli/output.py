"""What a command writes to stdout: one JSON document, or lines for a person."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
KIB = 1024


def json_option(command: Command) -> Command:
    """The option ``--json``, as the parameter ``as_json``."""
    text = "Write one JSON document to stdout and nothing else."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def note_search(recipe: Any) -> None:
    """Say on stderr that a recipe's ``search`` is not what this command acts on."""
    if recipe.search is not None:
        click.echo("quantkit: note: `search` is for `quantkit search`; this uses `quantization` as it is", err=True)


def emit(document: Mapping[str, Any] | Sequence[Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Write the result to stdout.

    Args:
        document: the result for machines; JSON-able, without NaN.
        lines: the result for a person.
        as_json: which of the two.
    """
    if as_json:
        click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    for line in lines:
        click.echo(line)


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> list[str]:
    """Lines with aligned columns; a column of numbers is aligned to the right."""
    cells = [[str(cell) for cell in row] for row in (*([header] if header else []), *rows)]
    if not cells:
        return []
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def size(num_bytes: float) -> str:
    """``538.1 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < KIB or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= KIB
    raise AssertionError("unreachable")


def verdict_lines(verdict: Mapping[str, Any]) -> list[str]:
    """The verdict, a row a gate with its reason, and what was measured without a limit."""
    gates = table([(f"  {gate['verdict']}", gate["name"], gate["reason"]) for gate in verdict["gates"]])
    unjudged = [(f"  {entry['suite']}.{entry['metric']}", _change(entry)) for entry in verdict["unjudged"]]
    note = ["measured without a limit, before -> after:", *table(unjudged)] if unjudged else []
    return [f"verdict: {verdict['verdict']}", *gates, *note]


def metric_lines(result: Mapping[str, Any]) -> list[str]:
    """A row a metric, with its interval."""
    rows = [
        (f"{suite}.{name}", number(metric["value"]), metric["unit"], interval(metric["interval"]), f"n={metric['n']}")
        for suite, record in result["suites"].items()
        for name, metric in record["metrics"].items()
    ]
    return table(rows)


def throughput_lines(record: Mapping[str, Any]) -> list[str]:
    """A row a batch: median tokens a second of both, and the median of the ratios of paired rounds."""
    rows = [
        (
            name,
            number(median(batch["baseline_tok_per_s"])),
            number(median(batch["candidate_tok_per_s"])),
            number(batch["ratio"]["value"]),
            _with_level(batch["ratio"]),
        )
        for name, batch in record["batches"].items()
    ]
    return table(rows, header=("batch", "baseline tok/s", "candidate tok/s", "median ratio of pairs", "interval"))


def number(value: float | None) -> str:
    """Four significant digits; a dash where there is no value."""
    return "-" if value is None else f"{value:.4g}"


def interval(ends: Sequence[float] | None) -> str:
    """``[0.91, 0.97]``, or nothing."""
    return "" if ends is None else f"[{number(ends[0])}, {number(ends[1])}]"


def _with_level(ratio: Mapping[str, Any]) -> str:
    """The interval with the confidence that it has: few pairs give little of it, one pair gives none."""
    return f"{interval(ratio['interval'])} {100 * ratio['confidence']:.0f} %" if ratio["interval"] else "one pair: none"


def _change(entry: Mapping[str, Any]) -> str:
    return f"{number(entry['baseline'])} -> {number(entry['candidate'])} {entry['unit']}"
