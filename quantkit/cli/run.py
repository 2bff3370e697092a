"""``quantkit run``."""

from typing import TYPE_CHECKING

import click

from quantkit.cli.device import device_option
from quantkit.cli.group import if_interrupted
from quantkit.cli.output import emit, json_option, note_search, verdict_lines
from quantkit.cli.progress import show_progress

if TYPE_CHECKING:
    from quantkit.serve.device import DeviceName

KEPT = "what is finished is kept, and --resume goes on with it"
DISCARDED = (
    "the layers of an unfinished checkpoint are discarded; --resume, given from the start, keeps them, "
    "and goes on with what is finished"
)


@click.command("run")
@click.argument("recipe", required=False)
@click.argument("model", required=False)
@click.option("-r", "--recipe", "option", metavar="RECIPE", help="RECIPE as an option, as the other verbs have it.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint and records of an earlier run.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on where an interrupted run of the same recipe stopped, and leave its work if interrupted.",
)
@click.option("--no-cache", is_flag=True, help="Evaluate the original anew, even if the cache holds its records.")
@device_option
@json_option
def run_command(
    recipe: str | None,
    model: str | None,
    option: str | None,
    overwrite: bool,
    resume: bool,
    no_cache: bool,
    device: "DeviceName",
    as_json: bool,
) -> int:
    """Quantize, serve before and after, evaluate both, compare, report: the whole of RECIPE.

    RECIPE is a YAML file or the name of a built-in recipe. MODEL is a hub id, a folder or a .gguf file and wins over
    the recipe's own.

    The exit code is the verdict: 0 pass, 3 quality regression, 4 inconclusive.
    """
    if option is not None:
        if model is not None:
            raise click.UsageError(f"two recipes: -r {option} and {recipe}")
        recipe, model = option, recipe
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'")
    from quantkit.recipe import load_recipe

    loaded = load_recipe(recipe).with_model(model)
    loaded.require_model()
    note_search(loaded)
    from quantkit import gate

    with if_interrupted(KEPT if resume else DISCARDED), show_progress() as progress:
        verdict = gate.run(
            loaded, overwrite=overwrite, resume=resume, use_cache=not no_cache, device=device, progress=progress
        )
    reports = [f"{kind}: {path}" for kind, path in loaded.report.paths.items()]
    emit(verdict, [*verdict_lines(verdict), *reports], as_json=as_json)
    return int(verdict["exit_code"])
