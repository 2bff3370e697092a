"""``quantkit compare``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quantkit.cli.output import emit, json_option, verdict_lines
from quantkit.cli.tables import comparison_lines

RECORDS = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("compare")
@click.argument("baseline", type=RECORDS)
@click.argument("candidates", metavar="CANDIDATE...", type=RECORDS, nargs=-1, required=True)
@click.option("-r", "--recipe", required=True, help="Its `gates` say how much worse a candidate may be.")
@click.option(
    "--throughput", type=FILE, help="Speed by `quantkit bench -o FILE`, in place of a throughput.json beside it."
)
@click.option("--control", type=RECORDS, help="A second evaluation of the baseline's model, for the noise floor.")
@click.option("-o", "--output", type=FILE, help="Also write the verdict (or the comparison of several) to this file.")
@click.option("--html", type=FILE, help="Of several candidates: also write a page with the table and the front.")
@json_option
def compare_command(
    baseline: Path,
    candidates: tuple[Path, ...],
    recipe: str,
    throughput: Path | None,
    control: Path | None,
    output: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Judge the records of one or more CANDIDATEs against those of BASELINE, folders that `quantkit eval` wrote.

    The exit code is the verdict, of several the worst: 0 pass, 3 quality regression, 4 inconclusive. Results whose
    prompts, template or sampling differ are refused. Several candidates are listed in one table. A throughput.json of
    the two models in a candidate's folder, or beside it, gives its speed.

    BASELINE may be any folder of records that was kept, such as the last release's; its model is not needed.

    For `quantkit report`, write the verdict of one candidate as verdict.json into the folder that holds the two records
    as baseline/ and candidate/: compare run/baseline run/candidate -o run/verdict.json
    """
    if len(candidates) > 1 and throughput:
        raise click.UsageError("--throughput is of one candidate; put each throughput.json into its candidate's folder")
    if html and len(candidates) == 1:
        raise click.UsageError("--html is of several candidates; for one, `quantkit report` writes the page")
    from quantkit.recipe import load_recipe
    from quantkit_eval.records import RECORD_FILES, check_outputs

    folders = filter(None, (baseline, *candidates, control))
    records = [folder / name for folder in folders for name in RECORD_FILES]
    check_outputs(filter(None, (output, html)), [*records, Path(recipe), *filter(None, (throughput,))])
    gates = load_recipe(recipe).gates
    limits = gates.limits
    _note_other_numbers(gates.num_items, baseline)
    if len(candidates) == 1:
        return _judge_one(baseline, candidates[0], limits, throughput, control, output, as_json)
    from quantkit_eval.comparison import compare_several
    from quantkit_eval.records import write_atomically, write_comparison
    from quantkit_eval.report.comparison_page import render_comparison

    comparison = compare_several(baseline, candidates, limits, control)
    if output:
        write_comparison(output, comparison)
    if html:
        write_atomically(html, render_comparison(comparison))
    emit(comparison, comparison_lines(comparison), as_json=as_json)
    return comparison["exit_code"]


def _note_other_numbers(num_items: Mapping[str, int], baseline: Path) -> None:
    """Say that records hold other numbers of items than the recipe asks for: they are judged as they are."""
    from quantkit_eval.records import RESULT_FILE, read_result

    suites = read_result(baseline / RESULT_FILE)["suites"]
    other = [
        f"{suite} {suites[suite]['num_items']} (num_items of the recipe: {asked})"
        for suite, asked in num_items.items()
        if suite in suites and suites[suite]["num_items"] != asked
    ]
    if other:
        click.echo(f"quantkit: note: the records are judged with all their items: {', '.join(other)}", err=True)


def _judge_one(
    baseline: Path,
    candidate: Path,
    limits: dict[str, Any],
    throughput: Path | None,
    control: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    from quantkit_eval.comparability import Evaluation
    from quantkit_eval.compare import compare
    from quantkit_eval.comparison import find_throughput
    from quantkit_eval.records import write_verdict

    if throughput is None:
        throughput, _ = find_throughput(Evaluation.read(baseline), Evaluation.read(candidate))
    verdict = compare(baseline, candidate, limits, throughput, control)
    if output:
        write_verdict(output, verdict)
    emit(verdict, verdict_lines(verdict), as_json=as_json)
    return verdict["exit_code"]
