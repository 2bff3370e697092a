"""Tables in docs/ that scripts write: each between two marks that name its script."""

from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_between_marks(page: str, script: str, text: str) -> None:
    """Replace what stands between the marks of ``script`` in docs/``page``.

    Raises:
        SystemExit: the page has no such marks.
    """
    path = DOCS / page
    begin, end = f"<!-- written by scripts/{script} -->", f"<!-- end of scripts/{script} -->"
    head, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{path} lacks the marks {begin} and {end}; put them where the table belongs")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def machine_line(machine: dict[str, object]) -> str:
    """Processor, cores and versions of a `describe_machine` record, as a sentence."""
    named = machine["versions"]
    assert isinstance(named, dict)
    versions = ", ".join(f"{name} {version}" for name, version in named.items() if version)
    return f"{machine['cpu']}, {machine['cpu_count']} cores; {versions}."
