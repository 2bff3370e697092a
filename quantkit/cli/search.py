"""``quantkit search``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.device import device_option
from quantkit.cli.group import if_interrupted
from quantkit.cli.number_range import NumberRange
from quantkit.cli.output import emit, json_option, size, table
from quantkit.cli.progress import show_progress

if TYPE_CHECKING:
    from quantkit.serve.device import DeviceName


@click.command("search")
@click.option("-r", "--recipe", required=True, help="A YAML file with `search`, or the name of a built-in recipe.")
@click.argument("model", required=False)
@click.option("--dry-run", is_flag=True, help="Print the candidates, the smallest first, and try none.")
@click.option("--resume", is_flag=True, help="Go on with the search in its folder; finished trials are not repeated.")
@click.option("--overwrite", is_flag=True, help="Replace the search in its folder, and reports.")
@click.option(
    "--budget-minutes",
    type=NumberRange(0, min_open=True),
    help="Begin no trial after so many minutes, in place of the recipe's.",
)
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Trials at the same time.")
@click.option("--ray", metavar="ADDRESS", help="Run trials on a Ray cluster: HOST:PORT, auto, local (docs/SEARCH.md).")
@device_option
@json_option
def search_command(
    recipe: str,
    model: str | None,
    dry_run: bool,
    resume: bool,
    overwrite: bool,
    budget_minutes: float | None,
    jobs: int,
    ray: str | None,
    device: "DeviceName",
    as_json: bool,
) -> int:
    """Find the smallest checkpoint of MODEL that passes the recipe's gates.

    Candidates are tried from the smallest upwards: quantized, screened on few items, and certified by the whole gate on
    other items. The end is a plain recipe, winner.yaml, that makes the winner again.

    The exit code is the outcome: 0 a candidate passes, 3 every one is shown to be too bad, 4 not decided.
    """
    from quantkit.recipe import load_recipe

    loaded = load_recipe(recipe).with_model(model)
    loaded.require_search()
    loaded.require_model()
    if dry_run:
        _show_candidates(loaded, as_json=as_json)
        return 0
    from quantkit.search.search import search

    kept = "finished trials and layers are kept, and --resume goes on with them"
    with if_interrupted(kept), show_progress() as progress:
        document = search(
            loaded,
            resume=resume,
            overwrite=overwrite,
            jobs=jobs,
            minutes=budget_minutes,
            device=device,
            progress=progress,
            executor=_on_ray(ray, jobs, progress) if ray is not None else None,
        )
    emit(document, outcome_lines(document), as_json=as_json)
    return int(document["exit_code"])


def _on_ray(address: str, jobs: int, progress: Any) -> Any:
    from quantkit.search.executors_ray import RayCluster

    return RayCluster(address, jobs, progress)


def _show_candidates(recipe: Any, *, as_json: bool) -> None:
    from quantkit.search.candidates import find_candidates
    from quantkit.source import open_model

    candidates, left_out = find_candidates(recipe, open_model(recipe))
    rows = [{"name": one.name, "planned_bytes": one.nbytes, "planned_bits": one.bits} for one in candidates]
    cells = [(one.name, f"{one.bits:.3f}", size(one.nbytes)) for one in candidates]
    lines = [*table(cells, header=("candidate", "bits a weight", "checkpoint")), *(f"left out: {x}" for x in left_out)]
    emit({"candidates": rows, "left_out": left_out}, lines, as_json=as_json)


def outcome_lines(document: Mapping[str, Any]) -> list[str]:
    """A row a candidate, then the outcome, the winner's two scores, and where everything lies."""
    cells = [
        (
            "*" if row["on_front"] else "",
            row["name"],
            f"{row.get('bits', row['planned_bits']):.3f}",
            size(row["weight_bytes"]) if "weight_bytes" in row else "-",
            row["status"],
            row.get("certified", {}).get("verdict", "-"),
            row.get("certified", row)["reason"],
        )
        for row in document["trials"]
    ]
    header = ("", "candidate", "bits", "weights", "screening", "certified", "reason")
    return [
        *table(cells, header),
        "* nothing else that was measured is as small, as good and as fast",
        *_scores(document),
        *(f"{name}: {path}" for name, path in document["paths"].items() if path),
        f"outcome: {document['outcome']}. {document['reason']}",
    ]


def _scores(document: Mapping[str, Any]) -> Sequence[str]:
    """The winner's selection scores beside its certified ones."""
    from quantkit.search.page import score_lines

    winner = next((row for row in document["trials"] if row["name"] == document["winner"]), None)
    if winner is None:
        return ()
    return [f"{name}: selected with {chosen}, certified with {final}" for name, chosen, final in score_lines(winner)]
