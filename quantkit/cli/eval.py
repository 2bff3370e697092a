"""``quantkit eval``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.device import device_option
from quantkit.cli.eval_server import open_server, refuse_server_options, server_options
from quantkit.cli.eval_tasks import TASK_OPTIONS, add_tasks, task_options
from quantkit.cli.group import if_interrupted
from quantkit.cli.number_range import NumberRange
from quantkit.cli.output import emit, json_option, metric_lines
from quantkit.cli.progress import Progress, show_progress
from quantkit.cli.tables import power_lines

if TYPE_CHECKING:
    from quantkit.serve.device import DeviceName
    from quantkit_eval.record_types import Result

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
@click.option("--constrained", is_flag=True, help="Also ask each suite for JSON with the form of its items enforced.")
@click.option("--resume", is_flag=True, help="Go on with the answers that an interrupted evaluation left in OUTPUT.")
@click.option("--no-cache", is_flag=True, help="Evaluate anew, even if the cache holds these records.")
@click.option("--power", is_flag=True, help="Evaluate nothing: say what the gates of the recipe can detect.")
@click.option(
    "--discordance",
    type=NumberRange(0, 1, min_open=True),
    help="With --power: share of items that will flip either way.  [default: 0.05, 0.1 and 0.2]",
)
@task_options
@server_options
@device_option
@json_option
def eval_command(
    model: str | None,
    output: Path | None,
    recipe: str | None,
    reference: Path | None,
    seed: int,
    batch_items: int | None,
    constrained: bool,
    resume: bool,
    no_cache: bool,
    power: bool,
    discordance: float | None,
    device: "DeviceName",
    as_json: bool,
    **more: Any,
) -> None:
    """Run the suites on MODEL and keep the records.

    MODEL is a hub id, a folder, a checkpoint, a .gguf file, or the URL of a server with OpenAI's interface (vLLM,
    SGLang, llama.cpp, quantkit serve), such as http://127.0.0.1:8000/v1.

    With --tasks, tasks of lm-eval (hellaswag, mmlu, your own) run through the same engine; their items enter `compare`
    like any suite's.

    With --power nothing is run: for each suite of the recipe it says how large a drop its items can detect, how likely
    a candidate that lost nothing passes, and how many items that would take.
    """
    from quantkit.recipe import Gates, load_recipe

    tasks = {name: more.pop(name) for name in TASK_OPTIONS}
    loaded = load_recipe(recipe) if recipe else None
    gates = loaded.gates if loaded else Gates()
    suites: Mapping[str, Mapping[str, Any]] = add_tasks(gates.suite_options, tasks, is_alone=recipe is None)
    if constrained:
        from quantkit_eval.suites import with_constrained

        suites = with_constrained(suites)
    if power:
        from quantkit_eval.power import power_table

        shares = (discordance,) if discordance else (0.05, 0.1, 0.2)
        rows = power_table(suites, gates.max_drop_pp, shares)
        emit(rows, power_lines(rows), as_json=as_json)
        return
    if model is None or output is None:
        raise click.UsageError(f"missing {'MODEL' if model is None else '--output'}")
    from quantkit_eval.evaluate import check_evaluation, evaluate
    from quantkit_eval.suites import BATCH_ITEMS
    from quantkit_eval.targets import is_url

    if loaded is not None:
        from quantkit.gate import check_recipe_suites

        check_recipe_suites(loaded)
    check_evaluation(suites, output, reference)
    if not is_url(model):
        refuse_server_options(more)
    kept = "the answers so far are kept, and the same command with --resume asks only for the rest"
    with if_interrupted(kept), show_progress() as progress:
        ask = partial(
            evaluate, suites=suites, seed=seed, out=output, reference=reference, progress=progress,
            batch_items=batch_items or BATCH_ITEMS, keep_answers=True, resume=resume,
        )  # fmt: skip
        if is_url(model):
            result = ask(open_server(model, more))
        else:
            is_cached = not (no_cache or resume or reference or batch_items)
            result = _evaluate_here(model, ask, is_cached, device, progress)
    skipped = [f"{suite}: not offered: {reason}" for suite, reason in result.get("not_offered", {}).items()]
    emit(result, [*metric_lines(result), *skipped, f"records: {output}"], as_json=as_json)


def _evaluate_here(
    model: str, ask: "partial[Result]", is_cached: bool, device: "DeviceName", progress: Progress
) -> "Result":
    """Evaluate with our engine, or take what the cache holds.

    Args:
        model: hub id, folder or file.
        ask: ``evaluate`` with all but the model.
        is_cached: read from the cache and write to it.
        device: where the engine runs.
        progress: tells that nothing was evaluated.

    Raises:
        EngineError: the model cannot be evaluated.
    """
    from quantkit.errors import EngineError
    from quantkit.evaluation_cache import CachedEvaluation
    from quantkit.gate import engine_config
    from quantkit.serve import Engine
    from quantkit.source import open_source
    from quantkit.text_model import EngineTextModel
    from quantkit_eval.records import RESULT_FILE, read_result

    output: Path = ask.keywords["out"]
    suites = ask.keywords["suites"]
    source = open_source(model)
    served = EngineTextModel(Engine(source, engine_config(source, device, suites)))
    cached = CachedEvaluation(served.describe(), suites, ask.keywords["seed"])
    if is_cached and cached.copy_to(output):
        progress(f"from the cache {cached.folder.parent}", 1, 1)
        return read_result(output / RESULT_FILE)
    try:
        result = ask(served)
    except EngineError as error:
        fix = error.fix or "If its weights are damaged or overflow, quantize it again or take another model"
        raise EngineError(f"{model} cannot be evaluated: {error.message}", fix=fix) from error
    if is_cached:
        cached.keep(output)
    return result
