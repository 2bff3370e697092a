"""``quantkit inspect``."""

import shutil

import click

from quantkit.cli.output import emit, json_option


@click.command("inspect")
@click.argument("path", required=False)
@click.option("--kernels", is_flag=True, help="Instead of PATH: which kernels run on this machine, and why.")
@json_option
def inspect_command(path: str | None, kernels: bool, as_json: bool) -> None:
    """Show what is in PATH: a checkpoint, a model folder, a hub id or a .gguf file. No weight is read."""
    if kernels == (path is not None):
        raise click.UsageError("give either PATH or --kernels")
    if path is None:
        import torch

        from quantkit_kernels.choices import choices_text

        lines = choices_text(torch.bfloat16)
        emit({"kernels": lines}, lines, as_json=as_json)
        return
    from quantkit.inspect_checkpoint import inspect_checkpoint
    from quantkit.inspect_text import inspection_text

    report = inspect_checkpoint(path)
    text = inspection_text(report, width=shutil.get_terminal_size((120, 24)).columns)
    emit(report, text.splitlines(), as_json=as_json)
