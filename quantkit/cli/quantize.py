"""``quantkit quantize``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.output import emit, json_option, size, table
from quantkit.cli.progress import show_progress

if TYPE_CHECKING:
    from quantkit.plan import Plan


@click.command("quantize")
@click.option("-r", "--recipe", required=True, help="A YAML file, or the name of a built-in recipe.")
@click.argument("model", required=False)
@click.option("--dry-run", is_flag=True, help="Print the plan, a row a layer, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace what lies in the output folder.")
@click.option(
    "--resume", is_flag=True, help="Go on where an interrupted run stopped, and leave its work if interrupted."
)
@json_option
def quantize_command(
    recipe: str, model: str | None, dry_run: bool, overwrite: bool, resume: bool, as_json: bool
) -> None:
    """Quantize MODEL and write the checkpoint that the recipe's `outputs` names.

    MODEL is a hub id, a folder or a .gguf file and wins over the recipe's own.
    """
    from quantkit.recipe import load_recipe

    loaded = load_recipe(recipe).with_model(model)
    loaded.require_quantization()
    loaded.require_model()
    if dry_run:
        from quantkit.plan import make_plan

        plan = make_plan(loaded)
        if loaded.require_quantization().has_target:
            from quantkit.allocation.allocate import check_target

            check_target(plan, loaded)
        emit(plan.to_dict(), _plan_lines(plan), as_json=as_json)
        return
    from quantkit.pipeline import quantize_model

    with show_progress() as progress:
        manifest = quantize_model(loaded, overwrite=overwrite, resume=resume, progress=progress)
    emit(manifest, _summary(manifest, [output.path for output in loaded.outputs]), as_json=as_json)


def _summary(manifest: Mapping[str, Any], folders: Sequence[Path]) -> list[str]:
    layers = manifest["layers"]
    before, after = (size(sum(layer[key] for layer in layers)) for key in ("bytes_before", "bytes_after"))
    return [f"{', '.join(map(str, folders))}: {len(layers)} layers in {manifest['seconds']:.0f} s, {before} -> {after}"]


def _plan_lines(plan: "Plan") -> list[str]:
    rows = [
        (layer.name, f"{layer.shape[0]}x{layer.shape[1]}", layer.scheme, layer.bytes_before, layer.bytes_after)
        for layer in plan.layers
    ]
    return [
        *table(rows, header=("layer", "shape", "scheme", "bytes before", "bytes after")),
        f"{len(plan.layers)} layers at {plan.bits_per_weight:.3f} bits a weight",
        f"linear layers that stay as they are: {', '.join(plan.ignored) or 'none'}",
        *(
            f"{entry.format.name} checkpoint {entry.output.path}: {size(plan.bytes_before)} -> {size(entry.nbytes)}"
            for entry in plan.outputs
        ),
        *plan.notes,
    ]
