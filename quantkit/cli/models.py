"""``quantkit models``."""

from dataclasses import asdict

import click

from quantkit.cli.output import emit, json_option, table


@click.command("models")
@json_option
def models_command(as_json: bool) -> None:
    """List the model families that are known by name.

    Another family works too: its decoder blocks are found by walking the model, and the layers that an engine joins
    into one matrix by their names. Where transforms may put scales is known only for the families listed here.
    """
    from quantkit.architectures import ARCHITECTURES

    facts = sorted(ARCHITECTURES.items())
    document = [{"family": name, **asdict(family)} for name, family in facts]
    rows = [(name, family.blocks, str(len(family.folds))) for name, family in facts]
    emit(document, table(rows, header=("family", "decoder blocks", "folds for transforms")), as_json=as_json)
