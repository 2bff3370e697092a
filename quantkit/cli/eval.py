"""``quantkit eval``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option, metric_lines
from quantkit.cli.progress import show_progress

RECORDS = click.Path(file_okay=False, path_type=Path)


@click.command("eval")
@click.argument("model")
@click.option("-o", "--output", required=True, type=RECORDS, help="Folder for samples.jsonl and result.json.")
@click.option("-r", "--recipe", help="Take suites and numbers of items from this recipe's `gates`.")
@click.option("--reference", type=RECORDS, help="Records of the baseline, to measure the KL divergence to it.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the items.")
@json_option
def eval_command(
    model: str, output: Path, recipe: str | None, reference: Path | None, seed: int, as_json: bool
) -> None:
    """Run the suites on MODEL, a hub id, a folder, a checkpoint or a .gguf file, and keep the records."""
    from quantkit.recipe import Gates, load_recipe

    gates = load_recipe(recipe).gates if recipe else Gates()
    from quantkit.gate import engine_config
    from quantkit.serve import Engine, EngineModel
    from quantkit.source import open_source
    from quantkit_eval.evaluate import evaluate

    with show_progress() as progress:
        source = open_source(model)
        served = EngineModel(Engine(source, engine_config(source)))
        result = evaluate(served, gates.suite_options, seed, output, reference, progress)
    emit(result, [*metric_lines(result), f"records: {output}"], as_json=as_json)
