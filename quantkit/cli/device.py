"""The option of every verb that starts an engine."""

import click

device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the engine runs; auto takes a GPU if there is one.",
)
