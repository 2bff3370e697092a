"""``quantkit bench --kernels``."""

import json

import click

from quantkit.cli.output import emit


def bench_kernels(*, as_json: bool) -> None:
    """Measure where one kernel overtakes another: a JSON object a line as it comes, or one document in the end."""
    from quantkit_kernels.crossover import records

    found = []
    for record in records():
        found.append(record)
        if not as_json:
            click.echo(json.dumps(record))
    if as_json:
        emit(found, (), as_json=True)
