"""``quantkit bench``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bench_kernels import bench_kernels
from quantkit.cli.device import device_option
from quantkit.cli.load_lines import load_lines
from quantkit.cli.output import emit, json_option, throughput_lines
from quantkit.cli.progress import show_progress

if TYPE_CHECKING:
    from quantkit.serve.device import DeviceName

COUNT = click.IntRange(min=1)
FILE = click.Path(dir_okay=False, path_type=Path)
BATCHES = (1, 16)  # of a throughput
LOAD_BATCHES = (1, 2, 4, 8, 16, 32, 64)
LOAD_TOKENS = 32


def _several(
    kind: Callable[[str], float], lowest: float
) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...] | None]:
    """The values of an option that are separated by commas."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Any, ...] | None:
        if text is None:
            return None
        try:
            values = tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is no list of numbers, such as 1,2,4") from None
        for value in values:
            if not lowest <= value < float("inf"):
                raise click.BadParameter(f"{value:g} is not at least {lowest:g}")
            if values.count(value) > 1:
                raise click.BadParameter(f"{value:g} is given twice")
        return values

    return read


@click.command("bench")
@click.argument("models", metavar="BASELINE CANDIDATE...", nargs=-1)
@click.option("--kernels", is_flag=True, help="Instead of models: measure where one kernel overtakes another.")
@click.option("--batches", metavar="N,N", callback=_several(int, 1),
              help="Requests at once.  [default: 1,16; with --contexts 1,2,4,8,16,32,64]")  # fmt: skip
@click.option("--contexts", metavar="N,N", callback=_several(int, 1),
              help="Measure a load: prompts of so many tokens, answers token by token.")  # fmt: skip
@click.option("--qps", metavar="X,X", callback=_several(float, 1e-3),
              help="With --contexts: also let requests arrive at random, so many a second.")  # fmt: skip
@click.option("--requests", type=COUNT, default=16, show_default=True, help="With --qps: requests of a run.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="With --contexts: of prompts and arrivals."
)
@click.option("--new-tokens", type=COUNT, help="Tokens that each request gets.  [default: 64; with --contexts 32]")
@click.option("--repeats", type=COUNT, default=5, show_default=True, help="Runs of each model, in the order A B A B.")
@click.option("-o", "--output", type=FILE, help="Also write throughput.json; with --contexts load.json.")
@click.option("--html", type=FILE, help="With --contexts: also write a page with curves.")
@device_option
@json_option
def bench_command(
    models: tuple[str, ...],
    kernels: bool,
    batches: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    qps: tuple[float, ...] | None,
    requests: int,
    seed: int,
    new_tokens: int | None,
    repeats: int,
    output: Path | None,
    html: Path | None,
    device: "DeviceName",
    as_json: bool,
) -> None:
    """Measure how fast CANDIDATE writes beside BASELINE: tokens a second in turns, and their ratio with an interval.

    With --contexts, of one or more candidates under load: time to the first token, time between tokens, memory, how
    many requests fit, and from which batch on a candidate is no faster than the baseline. No two prompts are alike, so
    that no prefix cache helps.
    """
    if kernels:
        if models:
            raise click.UsageError("give either BASELINE and CANDIDATE or --kernels")
        bench_kernels(as_json=as_json)
        return
    if len(models) < 2:
        raise click.UsageError("BASELINE and CANDIDATE are missing; give two models, or --kernels")
    if contexts is None:
        for is_given, option in ((qps, "--qps"), (html, "--html"), (len(models) > 2, "several candidates")):
            if is_given:
                raise click.UsageError(f"{option} needs --contexts: the lengths of the prompts")
    from quantkit_eval.records import check_outputs

    check_outputs(filter(None, (output, html)), (path for model in models for path in Path(model).glob("*")))
    if contexts is None:
        _throughput(models, batches or BATCHES, new_tokens or 64, repeats, output, device, as_json)
        return
    from quantkit_eval.load import LoadSettings

    settings = LoadSettings(
        batches or LOAD_BATCHES, contexts, qps or (), requests, new_tokens or LOAD_TOKENS, repeats, seed
    )
    _load(models, settings, output, html, device, as_json)


def _throughput(
    models: tuple[str, ...],
    batches: tuple[int, ...],
    new_tokens: int,
    repeats: int,
    output: Path | None,
    device: "DeviceName",
    as_json: bool,
) -> None:
    """What the gate min_throughput_ratio judges."""
    from dataclasses import replace

    from quantkit.gate import engine_config
    from quantkit.serve import Engine, EngineModel
    from quantkit.source import open_source
    from quantkit_eval.records import write_throughput
    from quantkit_eval.throughput import measure_throughput

    with show_progress() as progress:
        sources = [open_source(model) for model in models]
        configs = [replace(engine_config(source, device), enable_prefix_caching=False) for source in sources]
        first, second = (EngineModel(Engine(*pair)) for pair in zip(sources, configs, strict=True))
        record = measure_throughput(first, second, batches, new_tokens, repeats, progress=progress)
    if output:
        write_throughput(output, record)
    emit(record, throughput_lines(record), as_json=as_json)


def _load(
    models: tuple[str, ...],
    settings: Any,
    output: Path | None,
    html: Path | None,
    device: "DeviceName",
    as_json: bool,
) -> None:
    """A load, and its page."""
    from quantkit.load_target import EngineLoadTarget, load_engine_config
    from quantkit.serve import Engine
    from quantkit.source import open_source
    from quantkit_eval.load import measure_load
    from quantkit_eval.records import write_atomically, write_load
    from quantkit_eval.report.load_page import render_load

    with show_progress() as progress:
        sources = [open_source(model) for model in models]
        targets = [EngineLoadTarget(Engine(one, load_engine_config(one, settings, device))) for one in sources]
        record = measure_load(targets, settings, progress)
    if output:
        write_load(output, record)
    if html:
        write_atomically(html, render_load(record))
    emit(record, load_lines(record), as_json=as_json)
