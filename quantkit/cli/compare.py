"""``quantkit compare``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option, verdict_lines

RECORDS = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("compare")
@click.argument("baseline", type=RECORDS)
@click.argument("candidate", type=RECORDS)
@click.option("-r", "--recipe", required=True, help="Its `gates` say how much worse the candidate may be.")
@click.option("--throughput", type=FILE, help="throughput.json of `quantkit bench`, if a gate asks for speed.")
@click.option("-o", "--output", type=FILE, help="Also write the verdict to this file.")
@json_option
def compare_command(
    baseline: Path, candidate: Path, recipe: str, throughput: Path | None, output: Path | None, as_json: bool
) -> int:
    """Judge the records of CANDIDATE against those of BASELINE, two folders that `quantkit eval` wrote.

    The exit code is the verdict: 0 pass, 3 quality regression, 4 inconclusive. Two results whose prompts, template or
    sampling differ are refused.
    """
    from quantkit.recipe import load_recipe

    gates = load_recipe(recipe).gates
    from quantkit_eval.compare import compare
    from quantkit_eval.records import write_verdict

    verdict = compare(baseline, candidate, gates.limits, throughput)
    if output:
        write_verdict(output, verdict)
    emit(verdict, verdict_lines(verdict), as_json=as_json)
    return verdict["exit_code"]
