"""``quantkit eval``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option, metric_lines
from quantkit.cli.progress import show_progress
from quantkit.cli.tables import power_lines

RECORDS = click.Path(file_okay=False, path_type=Path)


@click.command("eval")
@click.argument("model", required=False)
@click.option("-o", "--output", type=RECORDS, help="Folder for samples.jsonl and result.json.")
@click.option("-r", "--recipe", help="Take suites and numbers of items from this recipe's `gates`.")
@click.option("--reference", type=RECORDS, help="Records of the baseline, to measure the KL divergence to it.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the items.")
@click.option(
    "--batch-items",
    type=click.IntRange(min=1),
    help="Items that the model gets at once; another number makes a control evaluation for `compare --control`.",
)
@click.option("--power", is_flag=True, help="Evaluate nothing: say what the gates of the recipe can detect.")
@click.option(
    "--discordance",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --power: share of items that will flip either way.  [default: 0.05, 0.1 and 0.2]",
)
@json_option
def eval_command(
    model: str | None,
    output: Path | None,
    recipe: str | None,
    reference: Path | None,
    seed: int,
    batch_items: int | None,
    power: bool,
    discordance: float | None,
    as_json: bool,
) -> None:
    """Run the suites on MODEL, a hub id, a folder, a checkpoint or a .gguf file, and keep the records.

    With --power nothing is run: for each suite of the recipe it says how large a drop its items can detect, how likely
    a candidate that lost nothing passes, and how many items that would take.
    """
    from quantkit.recipe import Gates, load_recipe

    gates = load_recipe(recipe).gates if recipe else Gates()
    if power:
        from quantkit_eval.power import power_table

        shares = (discordance,) if discordance else (0.05, 0.1, 0.2)
        rows = power_table(gates.suite_options, gates.max_drop_pp, shares)
        emit(rows, power_lines(rows), as_json=as_json)
        return
    if model is None or output is None:
        raise click.UsageError(f"missing {'MODEL' if model is None else '--output'}")
    from quantkit_eval.evaluate import check_evaluation, evaluate

    check_evaluation(gates.suite_options, output, reference)
    from quantkit.errors import EngineError
    from quantkit.gate import engine_config
    from quantkit.serve import Engine, EngineModel
    from quantkit.source import open_source
    from quantkit_eval.suites import BATCH_ITEMS

    with show_progress() as progress:
        source = open_source(model)
        served = EngineModel(Engine(source, engine_config(source)))
        options = gates.suite_options
        try:
            result = evaluate(served, options, seed, output, reference, progress, batch_items or BATCH_ITEMS)
        except EngineError as error:
            fix = error.fix or "If its weights are damaged or overflow, quantize it again or take another model"
            raise EngineError(f"{model} cannot be evaluated: {error.message}", fix=fix) from error
    emit(result, [*metric_lines(result), f"records: {output}"], as_json=as_json)
