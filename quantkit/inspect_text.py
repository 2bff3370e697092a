"""The report of `inspect_checkpoint` for a person."""

import io
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

MIB = 2**20


def render_inspection(report: Mapping[str, Any]) -> RenderableType:
    """The report as rich shows it."""
    parts: list[RenderableType] = [_summary(report), _schemes(report), _largest(report)]
    if report["worst_layers"]:
        parts.append(_worst(report))
    if report["provenance"]:
        parts.append(_facts("provenance", report["provenance"]))
    parts += [Text(f"note: {note}", style="yellow") for note in report["notes"]]
    return Group(*parts)


def inspection_text(report: Mapping[str, Any], width: int = 120) -> str:
    """The report as plain lines without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_inspection(report))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _summary(report: Mapping[str, Any]) -> Table:
    bits = report["bits_per_weight"]
    rows = {
        "model": f"{report['name']} ({report['model_type']})",
        "format": report["format"],
        "weights": f"{report['weights']:,}",
        "size": f"{_mib(report['bytes'])} in {len(report['files'])} file{'s' * (len(report['files']) != 1)}",
        "bits per weight": f"{_bits(bits['body'])} without embeddings and head, {_bits(bits['overall'])} overall",
        "quantized layers": str(report["quantized_layers"]),
    }
    if report["quantization"].get("ignore"):
        rows["ignored"] = ", ".join(report["quantization"]["ignore"])
    keys_and_values = report["quantization"].get("kv_cache_scheme")
    if keys_and_values:
        rows["keys and values"] = ", ".join(f"{key} {value}" for key, value in keys_and_values.items())
    if report["side_files"]:
        rows["side files"] = ", ".join(report["side_files"])
    table = _table("")
    table.show_header = False
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _schemes(report: Mapping[str, Any]) -> Table:
    table = _table(
        "stored as", "scheme", ("count", "right"), ("weights", "right"), ("size", "right"), ("share", "right")
    )
    for entry in report["schemes"]:
        share = entry["bytes"] / report["bytes"] if report["bytes"] else 0.0
        table.add_row(
            entry["scheme"], str(entry["count"]), f"{entry['weights']:,}", _mib(entry["bytes"]), f"{100 * share:.1f}%"
        )
    return table


def _largest(report: Mapping[str, Any]) -> Table:
    table = _table("largest", "name", "scheme", ("shape", "right"), ("size", "right"))
    for item in report["largest"]:
        table.add_row(item["name"], item["scheme"], " x ".join(map(str, item["shape"])), _mib(item["nbytes"]))
    return table


def _worst(report: Mapping[str, Any]) -> Table:
    measure = report["worst_layers"][0]["measure"].replace("_", " ")
    table = _table("layers with the largest error", "name", "scheme", "algorithm", (measure, "right"))
    for layer in report["worst_layers"]:
        table.add_row(layer["name"], layer.get("scheme", ""), layer.get("algorithm", ""), f"{layer['error']:.4f}")
    return table


def _facts(title: str, facts: Mapping[str, Any]) -> Table:
    table = _table(title)
    table.show_header = False
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
        table.add_row(name.replace("_", " "), Text(str(value)))
    return table


def _table(title: str, *columns: str | tuple[str, str]) -> Table:
    """A table without lines but one under its header; a column is a name, or a name and its side."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        name, side = (column, "left") if isinstance(column, str) else column
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
