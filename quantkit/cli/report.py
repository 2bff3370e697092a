"""``quantkit report``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("report")
@click.argument("run_folder", type=FOLDER)
@click.option("--checkpoint", type=FOLDER, help="The candidate's folder: adds its recipe and its layers to the report.")
@click.option("--html", type=FILE, help="One self-contained page.  [default: RUN_FOLDER/report.html]")
@click.option("--junit", type=FILE, help="JUnit XML, a test case a gate.  [default: RUN_FOLDER/junit.xml]")
@click.option("--markdown", type=FILE, help="For a pull request.  [default: RUN_FOLDER/report.md]")
@json_option
def report_command(
    run_folder: Path,
    checkpoint: Path | None,
    html: Path | None,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> None:
    """Write the report of RUN_FOLDER, which holds verdict.json and the records that it judged.

    RUN_FOLDER is the folder `records` of `quantkit run`, or one of your own with verdict.json (`quantkit compare -o`),
    baseline/ and candidate/ (`quantkit eval -o`) and, if speed was measured, throughput.json (`quantkit bench -o`).

    With none of --html, --junit and --markdown all three are written into RUN_FOLDER.
    """
    from quantkit.source import open_source
    from quantkit_eval.errors import RecordError
    from quantkit_eval.records import LOAD_FILE, RECORD_FILES, THROUGHPUT_FILE, VERDICT_FILE, check_outputs
    from quantkit_eval.report import load_report_input, write_report

    if not (html or junit or markdown):
        html, junit, markdown = run_folder / "report.html", run_folder / "junit.xml", run_folder / "report.md"
    records = [run_folder / side / name for side in ("baseline", "candidate") for name in RECORD_FILES]
    files = [run_folder / name for name in (VERDICT_FILE, THROUGHPUT_FILE, LOAD_FILE)]
    weights = checkpoint.iterdir() if checkpoint and checkpoint.is_dir() else ()
    check_outputs(filter(None, (html, junit, markdown)), [*records, *files, *weights])
    if not run_folder.is_dir():
        raise RecordError(f"no such folder: {run_folder}", fix="Give the folder `records` of `quantkit run`")
    fingerprint = open_source(checkpoint).fingerprint() if checkpoint else None
    written = write_report(load_report_input(run_folder, checkpoint, fingerprint), html, junit, markdown)
    emit({"files": [str(path) for path in written]}, map(str, written), as_json=as_json)
