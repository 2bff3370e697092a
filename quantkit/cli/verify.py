"""``quantkit verify``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option, table


@click.command("verify")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--source", help="The model it was made of; then everything that was only copied is compared too.")
@click.option("--no-load", is_flag=True, help="Do not load the model in transformers; needs far less memory.")
@json_option
def verify_command(checkpoint: Path, source: str | None, no_load: bool, as_json: bool) -> None:
    """Reload CHECKPOINT with other people's readers and compare hashes, codes, weights, side files and logits.

    CHECKPOINT is a folder, or a .gguf file, whose tensors and logits are compared with those of --source. The exit code
    is 1 if a check fails.
    """
    from quantkit.errors import SourceError
    from quantkit.source import open_source
    from quantkit.verify import verify_checkpoint

    if not checkpoint.exists():
        raise SourceError(f"no such folder or file: {checkpoint}", fix="Give what `quantkit quantize` wrote")
    if checkpoint.suffix == ".gguf":
        if not source:
            raise click.UsageError(
                f"{checkpoint.name} can only be compared with the model it was made of: give --source"
            )
        from quantkit.export_gguf.verify import verify_gguf

        report = verify_gguf(checkpoint, open_source(source), load_model=not no_load)
    else:
        report = verify_checkpoint(checkpoint, open_source(source) if source else None, load_model=not no_load)
    rows = [("ok" if check.ok else "FAILED", check.name, check.detail) for check in report.checks]
    rows += [("NOT CHECKED", name, why) for name, why in report.skipped.items()]
    emit(report.to_dict(), [*table(rows), *(f"note: {note}" for note in report.notes)], as_json=as_json)
    if report.skipped:
        click.echo(f"quantkit: warning: not checked: {', '.join(report.skipped)}", err=True)
    report.raise_for_failure()
