"""``quantkit quantize``."""

from collections import Counter
from typing import TYPE_CHECKING

import click

from quantkit.cli.group import if_interrupted
from quantkit.cli.output import emit, json_option, note_search, size, table
from quantkit.cli.progress import show_progress
from quantkit.formats.expert_names import join_names

if TYPE_CHECKING:
    from quantkit.gguf_files import GgufFile
    from quantkit.plan import Plan
    from quantkit.recipe import Recipe

KEPT = "the finished layers are kept, and --resume goes on with them"
DISCARDED = "what was done is discarded; --resume, given from the start, keeps it"


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
    """Quantize MODEL and write the checkpoints and GGUF files that the recipe's `outputs` name.

    MODEL is a hub id, a folder or a .gguf file and wins over the recipe's own.
    """
    from quantkit.recipe import load_recipe

    loaded = load_recipe(recipe).with_model(model)
    loaded.require_outputs()
    loaded.require_model()
    note_search(loaded)
    if dry_run:
        _show_plan(loaded, overwrite=overwrite or resume, as_json=as_json)
        return
    from quantkit.pipeline import quantize_model

    with if_interrupted(KEPT if resume else DISCARDED), show_progress() as progress:
        manifest = quantize_model(loaded, overwrite=overwrite, resume=resume, progress=progress)
    emit(manifest, _summary(loaded), as_json=as_json)


def _show_plan(recipe: "Recipe", *, overwrite: bool, as_json: bool) -> None:
    """The plan, after everything that the run itself would refuse before its work."""
    from quantkit.gguf_files import gguf_only_notes
    from quantkit.pipeline import check_data, plan_run
    from quantkit.source import open_model

    source = open_model(recipe)
    plan, files = plan_run(recipe, source, overwrite=overwrite, writes=False)
    check_data(recipe, source, plan, files)
    lines = gguf_only_notes(recipe)
    document: dict[str, object] = {"model": source.name, "notes": lines}
    if plan is not None:
        document, lines = plan.to_dict(), _plan_lines(plan)
    if files:
        document["gguf_files"] = [file.to_dict() for file in files]
    emit(document, [*lines, *(line for file in files for line in _file_lines(file))], as_json=as_json)


def _summary(recipe: "Recipe") -> list[str]:
    from quantkit.checkpoint.manifest import read_manifest

    lines = []
    if recipe.checkpoints:
        manifest = read_manifest(recipe.checkpoints[0].path) or {}
        layers = manifest["layers"]
        before, after = (size(sum(layer[key] for layer in layers)) for key in ("bytes_before", "bytes_after"))
        folders = ", ".join(str(output.path) for output in recipe.checkpoints)
        lines.append(f"{folders}: {len(layers)} layers in {manifest['seconds']:.0f} s, {before} -> {after}")
    for output in recipe.gguf_files:
        record = (read_manifest(output.path) or {})["gguf"]
        total = size(sum(file["bytes"] for file in record["files"]))
        bits = f"{record['bits_per_weight']:.3f} bits a weight"
        lines.append(f"{output.path}: {record['file_type']} in {record['seconds']:.0f} s, {total}, {bits}")
        lines += [f"note: {note}" for note in record["notes"]]
    return lines


def _file_lines(file: "GgufFile") -> list[str]:
    types = ", ".join(f"{count} {name}" for name, count in Counter(file.plan.types.values()).items())
    output = file.output
    chosen = f"; types will be chosen for {output.target_bpw} bits a weight" if output.target_bpw is not None else ""
    bits = file.plan.bits_per_weight
    return [
        f"gguf file {output.path}: {output.type}, {size(file.plan.num_bytes)}, {bits:.3f} bits a weight{chosen}",
        types,
    ]


def _plan_lines(plan: "Plan") -> list[str]:
    rows = [
        (layer.name, f"{layer.shape[0]}x{layer.shape[1]}", layer.scheme, layer.bytes_before, layer.bytes_after)
        for layer in plan.layers
    ]
    return [
        *table(rows, header=("layer", "shape", "scheme", "bytes before", "bytes after")),
        f"{len(plan.layers)} layers at {plan.bits_per_weight:.3f} bits a weight",
        f"linear layers that stay as they are: {', '.join(join_names(plan.ignored)) or 'none'}",
        *(
            f"{entry.format.name} checkpoint {entry.output.path}: {size(plan.bytes_before)} -> {size(entry.nbytes)}"
            for entry in plan.outputs
        ),
        *plan.notes,
    ]
