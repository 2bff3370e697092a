"""``quantkit bench``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli.device import device_option
from quantkit.cli.output import emit, json_option, throughput_lines
from quantkit.cli.progress import show_progress

if TYPE_CHECKING:
    from quantkit.serve.device import DeviceName

COUNT = click.IntRange(min=1)


@click.command("bench")
@click.argument("baseline", required=False)
@click.argument("candidate", required=False)
@click.option("--kernels", is_flag=True, help="Instead of models: measure where one kernel overtakes another.")
@click.option("--batch-size", "batch_sizes", type=COUNT, multiple=True, default=(1, 16), show_default=True,
              help="Requests at once; may be given several times.")  # fmt: skip
@click.option("--new-tokens", type=COUNT, default=64, show_default=True, help="Tokens that each request gets.")
@click.option("--repeats", type=COUNT, default=5, show_default=True, help="Pairs of runs, in the order A B A B.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write throughput.json.")
@device_option
@json_option
def bench_command(
    baseline: str | None,
    candidate: str | None,
    kernels: bool,
    batch_sizes: tuple[int, ...],
    new_tokens: int,
    repeats: int,
    output: Path | None,
    device: "DeviceName",
    as_json: bool,
) -> None:
    """Measure how fast CANDIDATE writes beside BASELINE: tokens a second in turns, and their ratio with an interval."""
    if kernels:
        if baseline is not None:
            raise click.UsageError("give either BASELINE and CANDIDATE or --kernels")
        from quantkit_kernels.crossover import main

        main()  # one JSON object a line
        return
    if baseline is None or candidate is None:
        raise click.UsageError("BASELINE and CANDIDATE are missing; give two models, or --kernels")
    for size in batch_sizes:
        if batch_sizes.count(size) > 1:
            raise click.BadParameter(f"{size} is given twice", param_hint="'--batch-size'")
    from quantkit.gate import engine_config
    from quantkit.serve import Engine, EngineModel
    from quantkit.source import open_source
    from quantkit_eval.records import check_writable, write_throughput
    from quantkit_eval.throughput import measure_throughput

    if output:
        check_writable(output)
    with show_progress() as progress:
        sources = [open_source(model) for model in (baseline, candidate)]
        first, second = (EngineModel(Engine(source, engine_config(source, device))) for source in sources)
        record = measure_throughput(first, second, batch_sizes, new_tokens, repeats, progress=progress)
    if output:
        write_throughput(output, record)
    emit(record, throughput_lines(record), as_json=as_json)
