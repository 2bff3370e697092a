"""``quantkit verify``."""

from pathlib import Path

import click

from quantkit.cli.output import emit, json_option, table


@click.command("verify")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--source", help="The model it was made of; then everything that was only copied is compared too.")
@click.option("--no-load", is_flag=True, help="Do not load the model in transformers; needs far less memory.")
@json_option
def verify_command(checkpoint: Path, source: str | None, no_load: bool, as_json: bool) -> None:
    """Reload CHECKPOINT with other people's readers and compare hashes, codes, weights, side files and logits.

    The exit code is 1 if a check fails.
    """
    from quantkit.source import open_source
    from quantkit.verify import verify_checkpoint

    report = verify_checkpoint(checkpoint, open_source(source) if source else None, load_model=not no_load)
    rows = [("ok" if check.ok else "FAILED", check.name, check.detail) for check in report.checks]
    emit(report.to_dict(), [*table(rows), *(f"note: {note}" for note in report.notes)], as_json=as_json)
    report.raise_for_failure()
