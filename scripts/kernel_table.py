#!/usr/bin/env python3
"""Write the table of launches into docs/KERNELS.md: what each compiles to, and the time that an H200 needs at least.

    .venv/bin/python scripts/kernel_table.py [--cache FOLDER] [--check]

Needs no GPU. ``--check`` writes nothing and fails if the page does not hold what the kernels say.
"""

import argparse
from pathlib import Path

import triton

from quantkit_kernels.compile_report import CompileReport, reports
from quantkit_kernels.launches import BYTES_PER_SECOND, CAPABILITIES, OPS_PER_SECOND, Launch, load_launches

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "KERNELS.md"
BEGIN, END = "<!-- scripts/kernel_table.py writes from here -->\n", "<!-- to here -->\n"
HEADINGS = (
    "op", "launch", "registers", "shared KiB", "tensor core", "128-bit loads", "MB", "GFLOP", "H200 µs", "limit"
)  # fmt: skip


def tensor_core(report: CompileReport) -> str:
    """Kind and number of the tensor-core instructions: warps, warp groups (sm_90), tensor memory (sm_100)."""
    kinds = [
        f"{report.counts[kind]} {name}" for kind, name in (("mma", "mma"), ("int8 mma", "int8")) if report.counts[kind]
    ]
    return (" ".join(kinds) + (" wide" if report.counts["wide mma"] else "")) if kinds else "-"


def joined(values: list[str]) -> str:
    """Values of the three capabilities, once if they agree."""
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def row(launch: Launch, by_capability: list[CompileReport]) -> str:
    """One line of the table."""
    loads = [str(r.loop_counts["128-bit loads"] if r.has_loop else r.counts["128-bit loads"]) for r in by_capability]
    by_memory = launch.bytes / BYTES_PER_SECOND >= launch.flops / OPS_PER_SECOND[launch.flop_dtype]
    cells = (
        launch.op,
        launch.label,
        joined([str(r.registers) for r in by_capability]),
        joined([f"{r.shared_bytes / 1024:.0f}" for r in by_capability]),
        joined([tensor_core(r) for r in by_capability]),
        joined(loads),
        f"{launch.bytes / 1e6:.1f}",
        f"{launch.flops / 1e9:.2f}",
        f"{launch.roofline_seconds * 1e6:.1f}",
        "memory" if by_memory else launch.flop_dtype,
    )
    return f"| {' | '.join(cells)} |"


def table(found: list[CompileReport], launches: dict[str, tuple[Launch, ...]]) -> str:
    """The table with the line above it."""
    by_launch: dict[tuple[str, str, str], list[CompileReport]] = {}
    for report in found:
        by_launch.setdefault((report.module, report.op, report.label), []).append(report)
    targets = " / ".join(f"sm_{number}" for number in CAPABILITIES)
    lines = [
        f"Compiled by Triton {triton.__version__} for {targets}, in that order where they differ; nothing spills.",
        f"H200: {BYTES_PER_SECOND / 1e12:.1f} TB/s, {OPS_PER_SECOND['bf16'] / 1e12:.0f} TFLOP/s bf16, "
        f"{OPS_PER_SECOND['int8'] / 1e12:,.0f} TOP/s int8, {OPS_PER_SECOND['fp32'] / 1e12:.0f} TFLOP/s fp32.",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
    ]
    for module, group in launches.items():
        lines += [row(launch, by_launch[module, launch.op, launch.label]) for launch in group]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / ".pytest_cache" / "d" / "compile_reports"  # tests/kernels/test_compile.py fills it
    parser.add_argument("--cache", type=Path, default=default, help="folder for what was found before")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    found = reports(cache=arguments.cache.resolve())
    spills = [f"{r.op} {r.label} sm_{r.capability}" for r in found if r.local_bytes or r.counts["spills"]]
    if spills:
        print("\n".join(["these spill:", *spills]))
        return 1
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = before + BEGIN + table(found, load_launches()) + END + after
    if arguments.check:
        same = text == PAGE.read_text()
        print("docs/KERNELS.md is up to date" if same else "docs/KERNELS.md is old: run scripts/kernel_table.py")
        return 0 if same else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
