"""``quantkit generate``."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.device import device_option
from quantkit.cli.output import emit, json_option

if TYPE_CHECKING:
    from quantkit.serve import Engine, RequestOutput
    from quantkit.serve.device import DeviceName

MAX_SEED = 2**63 - 1  # quantkit.serve.sampling_params.MAX_SEED, which would import torch


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the model's chat template.")
@click.option("--system", help="A system message before PROMPT.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Most new tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Mass of the nucleus.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of the sampling.")
@click.option("--stop", multiple=True, help="A text that ends the answer; may be given several times.")
@device_option
@json_option
def generate_command(
    model: str,
    prompt: str,
    raw: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    device: "DeviceName",
    as_json: bool,
) -> None:
    """Answer PROMPT with MODEL on the built-in engine; the text is written as it comes.

    PROMPT `-` is read from stdin.
    """
    if raw and system is not None:
        raise click.UsageError("--raw and --system exclude each other")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise click.UsageError("the prompt is empty")
    from quantkit.serve import Engine, EngineConfig, SamplingParams

    params = SamplingParams(temperature, top_p, max_tokens, stop, seed=seed)
    engine = Engine(model, EngineConfig(device=device, max_num_seqs=1))
    messages = [{"role": "system", "content": system}] if system is not None else []
    engine.add_request(text if raw else engine.chat.render([*messages, {"role": "user", "content": text}]), params)
    started, outputs = time.perf_counter(), []
    for output in _steps(engine):
        outputs.append(output)
        if not as_json:
            click.echo(output.text, nl=False)
    seconds = time.perf_counter() - started
    emit(_document(engine, outputs, seconds), [""], as_json=as_json)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt on stdin is not UTF-8 text (byte {error.start})") from error


def _document(engine: "Engine", outputs: Sequence["RequestOutput"], seconds: float) -> dict[str, Any]:
    return {
        "model": engine.describe()["model"],
        "text": "".join(output.text for output in outputs),
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "finish_reason": outputs[-1].finish_reason,
        "seconds": round(seconds, 3),
    }


def _steps(engine: "Engine") -> Iterator["RequestOutput"]:
    from quantkit.errors import EngineError

    while engine.has_unfinished:
        for output in engine.step():
            if output.error is not None:
                raise EngineError(output.error)
            yield output
