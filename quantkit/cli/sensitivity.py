"""``quantkit plan --sensitivity``: which layers suffer from which scheme."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from quantkit.cli.output import emit, number, size, table
from quantkit.cli.progress import show_progress

Command = TypeVar("Command", bound=Callable[..., Any])
BAR = 24  # characters of the whole


def sensitivity_options(command: Command) -> Command:
    """The options ``--sensitivity``, ``--recipe`` and ``--plot``."""
    plot = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("--plot", type=plot, help="With --sensitivity: also draw it, as SVG."),
        click.option("-r", "--recipe", help="With --sensitivity: whose candidates and calibration are taken."),
        click.option("--sensitivity", is_flag=True, help="Measure what each scheme costs each layer; reads weights."),
    ):
        command = option(command)
    return command


def refuse_sensitivity_options(recipe: str | None, plot: Path | None) -> None:
    """Raise click.UsageError if they are given without ``--sensitivity``."""
    for name, value in (("--recipe", recipe), ("--plot", plot)):
        if value is not None:
            raise click.UsageError(f"{name} goes with --sensitivity")


def show_sensitivity(model: str | None, recipe: str | None, plot: Path | None, *, as_json: bool) -> None:
    """Measure and print the table.

    Raises:
        click.UsageError: no recipe.
        QuantkitError: the model or the recipe cannot be taken.
    """
    if recipe is None:
        raise click.UsageError("--sensitivity needs --recipe: its scheme, candidates and calibration")
    from quantkit.recipe import load_recipe

    loaded = load_recipe(recipe).with_model(model)
    loaded.require_quantization()
    loaded.require_model()
    from quantkit.allocation.sensitivity_table import sensitivity_table
    from quantkit_eval.records import check_writable, write_atomically

    if plot is not None:
        check_writable(plot)
    with show_progress() as progress:
        document = sensitivity_table(loaded, progress)
    if plot is not None:
        from quantkit.allocation.sensitivity_plot import draw_sensitivity

        write_atomically(plot, draw_sensitivity(document))
    emit(document, sensitivity_lines(document), as_json=as_json)


def sensitivity_lines(document: Mapping[str, Any]) -> list[str]:
    """A row a unit and candidate, the unit that suffers most first."""
    rows = [
        (
            unit["unit"] if not index else "",
            entry["scheme"],
            number(entry["kl"]),
            number(entry["standard_error"]),
            size(entry["bytes"]),
            f"{100 * entry['share']:.1f} %",
            "#" * round(BAR * entry["share"] / document["largest_share"]) if document["largest_share"] > 0 else "",
        )
        for unit in document["units"]
        for index, entry in enumerate(unit["candidates"])
    ]
    header = ("unit", "scheme", "KL", "standard error", "bytes", "share", "")
    return [*table(rows, header=header), *document["notes"]]
