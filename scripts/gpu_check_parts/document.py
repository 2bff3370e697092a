"""The report of a GPU check as tables, and what it says about the aims."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "KERNELS.md"
HEADING = "\n## Measured on a GPU\n"
BEGIN, END = "<!-- scripts/gpu_check writes from here -->\n", "<!-- to here, by scripts/gpu_check -->\n"


def aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What is aimed at on an H200, and the least that was measured; None where nothing was."""
    ops, engine = report["ops"], report["engine"]

    def of(op: str, *words: str) -> list[dict[str, Any]]:
        return [
            record for record in ops
            if record["op"] == op and "microseconds" in record and any(word in record["case"] for word in words)
        ]  # fmt: skip

    decode = [record["roofline_fraction"] for record in of("paged_attention", "32 sequences of 4096")]
    few = [record["times_torch"] for record in of("w4a16_gemm", "M=1,", "M=16,") if "llama" in record["case"]]
    many = [record["times_torch"] for record in of("w8a8_gemm", "M=2048")]
    model = [
        record["roofline_fraction"] for record in engine
        if record.get("weights") == "bf16" and record.get("batch") == 1 and "roofline_fraction" in record
    ]  # fmt: skip
    rows = (
        ("decode attention, share of the memory's bandwidth", 0.7, decode),
        ("W4A16 at M <= 16, times torch's bfloat16", 3.0, few),
        ("W8A8 at M = 2048, times torch's bfloat16", 1.5, many),
        ("decoding the 1B model, share of the memory's bandwidth", 0.6, model),
    )
    return [
        {"aim": name, "wanted": wanted, "least": min(found, default=None),
         "is_met": min(found) >= wanted if found else None}
        for name, wanted, found in rows
    ]  # fmt: skip


def is_wrong(record: dict[str, Any]) -> bool:
    """Whether something failed, or gave other numbers than it should."""
    return "failed" in record or not record.get("passed", True)


def tables(report: dict[str, Any]) -> str:
    """Markdown: the machine, the aims, the operations, the engine."""
    machine = report["machine"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, quantkit {machine['quantkit']}. "
        "The roofline is an H200's; torch runs in the same process, its products with bfloat16 weights.",
        "",
        "| aim | wanted | least measured | met |",
        "|---|---|---|---|",
        *(f"| {row['aim']} | {row['wanted']} | {_number(row['least'])} | {_yes(row['is_met'])} |"
          for row in report["aims"]),
        "",
        "| op | case | error | allowed | µs | roofline | times torch |",
        "|---|---|---|---|---|---|---|",
        *(_op_row(record) for record in report["ops"]),
        "",
        "| weights | batch | tokens/s | ms a step | roofline |",
        "|---|---|---|---|---|",
        *(_engine_row(record) for record in report["engine"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_page(report: dict[str, Any]) -> None:
    """Put the tables into docs/KERNELS.md, between their markers."""
    text = PAGE.read_text()
    if BEGIN not in text:
        text += HEADING + BEGIN + END
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + tables(report) + END + after)


def _op_row(record: dict[str, Any]) -> str:
    reason = record.get("skipped") or record.get("failed")
    if reason:
        return f"| {record['op']} | {record['case']} | {reason} | | | | |"
    error = f"{record['error']:.1e}" + ("" if record["passed"] else " WRONG")
    speed = [record.get("not_timed", ""), "", ""]
    if "microseconds" in record:
        ratio = f"{record['times_torch']:.2f}" if "times_torch" in record else ""
        speed = [f"{record['microseconds']:.1f}", f"{record['roofline_fraction']:.0%}", ratio]
    return f"| {record['op']} | {record['case']} | {error} | {record['allowed']:.1e} | {' | '.join(speed)} |"


def _engine_row(record: dict[str, Any]) -> str:
    name = f"| {record.get('weights', record.get('op'))} | {record.get('batch', record.get('compare', ''))} |"
    reason = record.get("skipped") or record.get("failed")
    if reason:
        return f"{name} {reason} | | |"
    if "kl_nats" in record:
        return f"{name} KL divergence {record['kl_nats']:.1e} nats | | |"
    return (
        f"{name} {record['tokens_per_second']:.0f} | {record['milliseconds_per_step']:.2f} | "
        f"{record['roofline_fraction']:.0%} |"
    )


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _yes(value: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[value]
