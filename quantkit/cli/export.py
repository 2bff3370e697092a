"""``quantkit export``."""

from pathlib import Path
from typing import Any

import click

from quantkit.cli.output import emit, json_option, size
from quantkit.cli.progress import show_progress


@click.group("export")
def export_group() -> None:
    """Write a model in the format of another engine."""


@export_group.command("gguf")
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The .gguf file.")
@click.option(
    "--type", "file_type", default="Q4_K_M", show_default=True, help="File type, such as F16, Q8_0 or Q4_K_M."
)
@click.option("--calibration", help="`builtin` or a text file: run the model over it to see which columns matter.")
@click.option("--tokens", default=16384, show_default=True, help="Tokens of the calibration.")
@click.option(
    "--error-feedback", is_flag=True, help="Let open columns make up for rounding errors (GPTQ); needs --calibration."
)
@click.option("--imatrix", type=click.Path(dir_okay=False, path_type=Path), help="llama.cpp's importance matrix.")
@click.option(
    "--save-imatrix", type=click.Path(dir_okay=False, path_type=Path), help="Write what was measured; .gguf or .dat."
)
@click.option(
    "--target-bpw", type=float, help="Choose types for the least loss at so many bits a weight; needs --calibration."
)
@click.option(
    "--tensor-type",
    "tensor_types",
    multiple=True,
    metavar="REGEX=TYPE",
    help="Type of tensors whose GGUF name matches.",
)
@click.option("--pretokenizer", help="llama.cpp's name of the pre-tokenizer, where it is not recognized.")
@click.option("--split-size", type=float, help="Write parts of at most so many GB.")
@click.option("--allow-requantize", is_flag=True, help="Take a .gguf that holds codes; their errors add up.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@json_option
def gguf_command(model: str, output: Path, as_json: bool, tensor_types: tuple[str, ...], **options: Any) -> None:
    """Write MODEL, in its original weights, as a GGUF file for llama.cpp, and its hash into NAME.quantkit.json.

    MODEL is a hub id, a folder or a .gguf, of floats unless --allow-requantize is given. Without --imatrix and
    --calibration the types are those of llama-quantize, and the old types are rounded as it rounds them.
    """
    from quantkit.export_gguf.request import ExportRequest, run_export

    options["file_type"] = options["file_type"].upper()
    request = ExportRequest(model=model, path=output, overrides=tuple(map(_override, tensor_types)), **options)
    with show_progress() as progress:
        record = run_export(request, progress)
    emit(record, _summary(record), as_json=as_json)


def _override(text: str) -> tuple[str, str]:
    pattern, separator, type_name = text.rpartition("=")
    if not separator or not pattern:
        raise click.UsageError(f"--tensor-type {text!r} is not of the form REGEX=TYPE")
    return pattern, type_name.upper()


def _summary(record: dict[str, Any]) -> list[str]:
    types = ", ".join(f"{count} {name}" for name, count in record["types"].items())
    total = sum(file["bytes"] for file in record["files"])
    names = ", ".join(file["name"] for file in record["files"])
    return [
        f"{names}: {record['file_type']}, {size(total)}, {record['bits_per_weight']:.3f} bits a weight",
        f"tensors: {types}",
        *(f"note: {note}" for note in record["notes"]),
    ]
