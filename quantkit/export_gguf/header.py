"""Everything that a file says before its tensors: what llama.cpp asks for, and where the file comes from."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFWriter

from quantkit import __version__
from quantkit.export_gguf.metadata import add_hyperparameters
from quantkit.export_gguf.mixes import file_type_number
from quantkit.export_gguf.plan import ExportPlan
from quantkit.export_gguf.tokenizer import add_tokenizer
from quantkit.formats.gguf.header import DEFAULT_ALIGNMENT, read_gguf_header
from quantkit.source import ModelSource
from quantkit.source.folder import read_json
from quantkit.source.gguf import CONFIG_KEY

FINGERPRINT_KEY = "quantkit.source_fingerprint"
PRETOKENIZER_KEY = "quantkit.pretokenizer"  # the one that the user named
WEIGHTED_KEY = "quantkit.weighted_rounding"  # whether importance or error feedback had a say


def add_header(writer: GGUFWriter, plan: ExportPlan) -> list[str]:
    """Write every entry before the tensors.

    Args:
        writer: of the file.
        plan: of the file.

    Returns:
        What llama.cpp will not do as the model does, and what is left out or filled up, a line each.

    Raises:
        UsageError: the model has something that llama.cpp does not know.
    """
    source = plan.source
    writer.add_type("model")
    writer.add_name(source.name)
    writer.add_file_type(file_type_number(plan.file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    notes = add_hyperparameters(writer, source.config, plan.family)
    add_tokenizer(writer, source.tokenizer(), plan.vocabulary, _end_tokens(source))
    writer.add_string("quantkit.version", __version__)
    writer.add_string(CONFIG_KEY, (source.folder / "config.json").read_text(encoding="utf-8"))
    writer.add_string("quantkit.source", source.name)
    writer.add_string(FINGERPRINT_KEY, source.fingerprint())
    if source.revision:
        writer.add_string("quantkit.source_revision", source.revision)
    if plan.named_pretokenizer:
        writer.add_string(PRETOKENIZER_KEY, plan.named_pretokenizer)
    if source.gguf is not None:
        notes.append(source.gguf.note(source.name))
    return notes + plan.vocabulary.notes


def expected_metadata(plan: ExportPlan) -> Mapping[str, Any]:
    """What a file of this plan says, as a reader finds it: arrays are tuples, numbers have their stored precision."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        writer = GGUFWriter(path, plan.family.name)
        try:
            add_header(writer, plan)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
        finally:
            writer.close()
        with path.open("ab") as file:
            file.write(bytes(DEFAULT_ALIGNMENT))  # where tensors would begin
        return read_gguf_header(path).metadata


def _end_tokens(source: ModelSource) -> list[int]:
    """Every token at which a generation ends, by generation_config.json, else by config.json."""
    path = source.folder / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.is_file() else None
    value = getattr(source.config, "eos_token_id", None) if value is None else value
    return [int(token) for token in (value if isinstance(value, list) else [] if value is None else [value])]
