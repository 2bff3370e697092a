"""``quantkit inspect``."""

import shutil

import click

from quantkit.cli.output import emit, json_option


@click.command("inspect")
@click.argument("path")
@json_option
def inspect_command(path: str, as_json: bool) -> None:
    """Show what is in PATH: a checkpoint, a model folder, a hub id or a .gguf file. No weight is read."""
    from quantkit.inspect_checkpoint import inspect_checkpoint
    from quantkit.inspect_text import inspection_text

    report = inspect_checkpoint(path)
    text = inspection_text(report, width=shutil.get_terminal_size((120, 24)).columns)
    emit(report, text.splitlines(), as_json=as_json)
