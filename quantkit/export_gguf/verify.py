"""A GGUF file read back with the gguf package and compared with the model that it was made of."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from quantkit.export_gguf.output_file import all_parts
from quantkit.export_gguf.plan import ExportPlan, make_export_plan
from quantkit.export_gguf.tensors import ParameterReader
from quantkit.export_gguf.verify_logits import check_logits
from quantkit.formats.gguf.block_types import BLOCK_TYPES, PLAIN_TYPES
from quantkit.formats.gguf.header import GgufHeaderError, read_gguf_header
from quantkit.source import ModelSource
from quantkit.verify import VerifyReport

# Largest relative error of a tensor: half a step of rounding over three standard deviations, twice over.
LARGEST_ERROR = {"Q2_K": 0.6, "Q3_K": 0.35, "Q8_0": 0.02, "Q6_K": 0.06, "Q5_K": 0.12, "Q5_0": 0.12, "Q5_1": 0.12}
OTHER_ERROR = 0.25


def verify_gguf(path: Path, source: ModelSource, *, load_model: bool = True) -> VerifyReport:
    """Check that a file is whole, that its tensors decode to about the model's weights, and what it answers.

    Args:
        path: the file, or the first of its parts.
        source: the model that it was made of.
        load_model: compare logits too, which needs memory for the whole model in float32.

    Raises:
        UsageError: the model cannot be written as GGUF.
    """
    report = VerifyReport(path.name)
    try:
        headers = [read_gguf_header(part) for part in all_parts(path)]
    except (GgufHeaderError, OSError) as error:
        report.add("file", [f"{path.name}: {error}"], "")
        return report
    metadata: dict[str, Any] = headers[0].metadata
    report.add("file", [], f"{len(headers)} whole files of GGUF version {headers[0].version}")
    plan = make_export_plan(source, "F16", pretokenizer=metadata.get("tokenizer.ggml.pre"))
    recorded = metadata.get("quantkit.source_fingerprint")
    if recorded is None:
        report.notes.append("quantkit did not write it: the source's fingerprint is unknown")
    else:
        other = [] if recorded == source.fingerprint() else [f"it was not made of {source.name} as it is now"]
        report.add("same_source", other, f"it was made of {source.name}")
    _check_vocabulary(report, plan, metadata)
    _check_tensors(report, plan, path)
    if not load_model:
        report.notes.append("the model was not loaded: logits were not compared")
    elif {"every_tensor", "tensors"} & set(report.failed()):
        report.skipped["logits"] = "its tensors are not the model's"
    else:
        check_logits(report, plan, all_parts(path), metadata)
    return report


def _check_vocabulary(report: VerifyReport, plan: ExportPlan, metadata: dict[str, Any]) -> None:
    ours = plan.vocabulary
    stored = list(metadata.get("tokenizer.ggml.tokens", ()))
    problems = [
        f"token {number} is {got!r}, the model's is {token!r}"
        for number, (token, got) in enumerate(zip(ours.tokens, stored, strict=False))
        if token != got
    ]
    if len(stored) != len(ours.tokens):
        problems.append(f"it has {len(stored)} tokens, the model {len(ours.tokens)}")
    if ours.merges is not None and list(metadata.get("tokenizer.ggml.merges", ())) != ours.merges:
        problems.append("its merges are not the model's")
    report.add("vocabulary", problems, f"{len(stored)} tokens are the model's")


def _check_tensors(report: VerifyReport, plan: ExportPlan, path: Path) -> None:
    stored = {tensor.name: tensor for part in all_parts(path) for tensor in gguf.GGUFReader(part).tensors}
    expected = {tensor.name for tensor in plan.tensors} | set(plan.rope)
    lost = [f"{name} is missing" for name in sorted(expected - stored.keys())]
    report.add("every_tensor", lost + [f"{name} is unknown" for name in sorted(stored.keys() - expected)], "all there")
    reader = ParameterReader(plan.source, plan.model)
    problems, worst = [], 0.0
    for tensor in plan.tensors:
        if tensor.name not in stored:
            continue
        found = stored[tensor.name]
        decoded = torch.from_numpy(np.array(gguf.quants.dequantize(found.data, found.tensor_type)))
        error = _relative_error(decoded.reshape(-1), reader.read(tensor).float().reshape(-1))
        kind = found.tensor_type.name
        limit = 0.005 if kind in PLAIN_TYPES else LARGEST_ERROR.get(kind, OTHER_ERROR)
        worst = max(worst, error if kind in BLOCK_TYPES else 0.0)
        if not error <= limit:
            problems.append(f"{tensor.name} ({kind}) differs from the model's weights by {error:.1%}")
    report.add(
        "tensors", problems, f"{len(stored)} tensors decode to the model's weights, the worst within {worst:.1%}"
    )


def _relative_error(decoded: Tensor, weight: Tensor) -> float:
    """Norm of the difference against the norm of the weights; infinite for another number of values."""
    if decoded.shape != weight.shape:
        return float("inf")
    size = float(weight.norm())
    return float((decoded - weight).norm()) / size if size > 0 else float(decoded.norm())
