"""A GGUF file read back with the gguf package and compared with the model that it was made of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import manifest_path, read_manifest
from quantkit.errors import CheckpointError
from quantkit.export_gguf.header import FINGERPRINT_KEY, PRETOKENIZER_KEY, WEIGHTED_KEY
from quantkit.export_gguf.output_file import all_parts, asked_name
from quantkit.export_gguf.plan import ExportPlan, make_export_plan
from quantkit.export_gguf.pretokenizer import LLAMA_CPP_NAMES
from quantkit.export_gguf.verify_logits import check_logits
from quantkit.export_gguf.verify_metadata import check_metadata
from quantkit.export_gguf.verify_tensors import check_tensors
from quantkit.formats.gguf.header import GgufHeader, GgufHeaderError, read_gguf_header
from quantkit.source import ModelSource
from quantkit.source.gguf import file_sha256
from quantkit.verify import VerifyReport


def verify_gguf(path: Path, source: ModelSource, *, load_model: bool = True) -> VerifyReport:
    """Check that a file is whole, that it says what the model is, that its tensors are its weights, what it answers.

    Args:
        path: the file, or the first of its parts.
        source: the model that it was made of.
        load_model: compare logits too, which needs memory for the whole model in float32.

    Returns:
        The report; it does not raise for a bad file.

    Raises:
        UsageError: the model cannot be written as GGUF.
    """
    report = VerifyReport(path.name)
    parts = all_parts(path)
    try:
        headers = [read_gguf_header(part) for part in parts]
    except (GgufHeaderError, OSError) as error:
        report.add("file", [f"{path.name}: {error}"], "")
        return report
    sizes = [line for part, header in zip(parts, headers, strict=True) if (line := _wrong_size(part, header))]
    report.add("file", sizes, f"{len(headers)} whole files of GGUF version {headers[0].version}")
    metadata: dict[str, Any] = headers[0].metadata
    _check_hashes(report, path)
    plan = _plan(source, metadata)
    recorded = metadata.get(FINGERPRINT_KEY)
    if recorded is None:
        report.notes.append("quantkit did not write it: the source's fingerprint is unknown")
    else:
        other = [] if recorded == source.fingerprint() else [f"it was not made of {source.name} as it is now"]
        report.add("same_source", other, f"it was made of {source.name}")
    check_metadata(report, plan, metadata)
    weighted = recorded is None or bool(metadata.get(WEIGHTED_KEY, True))
    check_tensors(report, plan, parts, weighted=weighted)
    if not load_model:
        report.notes.append("the model was not loaded: logits were not compared")
    elif {"every_tensor", "tensors"} & set(report.failed()):
        report.skipped["logits"] = "its tensors are not the model's"
    else:
        check_logits(report, plan, parts, metadata)
    return report


def _wrong_size(path: Path, header: GgufHeader) -> str | None:
    """A file ends with its last tensor, or where that is filled up to the alignment."""
    filled = -(-header.data_end // header.alignment) * header.alignment
    size = path.stat().st_size
    return None if size in (header.data_end, filled) else f"{path.name} has {size - filled} bytes after its last tensor"


def _check_hashes(report: VerifyReport, path: Path) -> None:
    """The file and its parts are those that the manifest names."""
    asked = asked_name(path)
    try:
        manifest = read_manifest(asked)
    except CheckpointError as error:
        report.add("hashes", [str(error)], "")
        return
    if manifest is None:
        name = manifest_path(asked).name
        report.skipped["hashes"] = f"without {name} the file's hash is unknown, so a change may not show"
        return
    recorded = manifest.get("files", {})
    problems = [] if path.name in recorded else [f"{path.name} is not in {manifest_path(asked).name}"]
    for name, digest in recorded.items():
        place = path.parent / name
        if not place.is_file():
            problems.append(f"{name} is missing")
        elif file_sha256(place) != digest:
            problems.append(f"{name} has changed since it was written")
    report.add("hashes", problems, f"{len(recorded)} files are as they were written")


def _plan(source: ModelSource, metadata: Mapping[str, Any]) -> ExportPlan:
    """What quantkit would write, with the pre-tokenizer that a user has named; in files of others, with theirs."""
    named = metadata.get(PRETOKENIZER_KEY if FINGERPRINT_KEY in metadata else "tokenizer.ggml.pre")
    return make_export_plan(source, "F16", pretokenizer=named if named in LLAMA_CPP_NAMES else None)
