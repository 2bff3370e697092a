"""What a report is made from: the records of one run, and the checkpoint's own record if there is one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quantkit_eval.errors import RecordError
from quantkit_eval.records import (
    RESULT_FILE,
    SAMPLES_FILE,
    THROUGHPUT_FILE,
    VERDICT_FILE,
    Result,
    Sample,
    Throughput,
    Verdict,
    read_result,
    read_samples,
    read_throughput,
    read_verdict,
)
from quantkit_eval.report.visible import visible_record

CHECKPOINT_RECORD = "quantkit.json"
CHECKPOINT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReportInput:
    """The records of one run.

    Attributes:
        verdict: the comparison.
        baseline: metrics of the model before.
        candidate: metrics of the model after.
        baseline_samples: its items.
        candidate_samples: the candidate's items.
        throughput: speed of both, or None if it was not measured.
        checkpoint: quantkit.json (recipe, layers, calibration, versions), or None if the candidate has none.
        weights_bytes: size of the checkpoint's safetensors files; None without a checkpoint folder.
    """

    verdict: Verdict
    baseline: Result
    candidate: Result
    baseline_samples: Sequence[Sample] = ()
    candidate_samples: Sequence[Sample] = ()
    throughput: Throughput | None = None
    checkpoint: Mapping[str, Any] | None = None
    weights_bytes: int | None = None

    def made_visible(self) -> "ReportInput":
        """A copy whose texts hold no control, direction or unencodable character (see ``visible``)."""
        return ReportInput(**{field.name: visible_record(getattr(self, field.name)) for field in fields(self)})


def load_report_input(records: Path, checkpoint: Path | None = None) -> ReportInput:
    """Read the records of a run.

    Args:
        records: folder with verdict.json, baseline/, candidate/ and perhaps throughput.json.
        checkpoint: folder of the candidate, for its quantkit.json and the size of its weights. Without it, or if it
            has no quantkit.json (it came from elsewhere, or is the original), the report has no layers and no recipe.

    Raises:
        RecordError: a record is missing, damaged or does not fit its schema.
    """
    throughput = records / THROUGHPUT_FILE
    return ReportInput(
        verdict=read_verdict(records / VERDICT_FILE),
        baseline=read_result(records / "baseline" / RESULT_FILE),
        candidate=read_result(records / "candidate" / RESULT_FILE),
        baseline_samples=read_samples(records / "baseline" / SAMPLES_FILE),
        candidate_samples=read_samples(records / "candidate" / SAMPLES_FILE),
        throughput=read_throughput(throughput) if throughput.exists() else None,
        checkpoint=_read_checkpoint_record(checkpoint / CHECKPOINT_RECORD) if checkpoint else None,
        weights_bytes=_weights_bytes(checkpoint) if checkpoint else None,
    )


def _read_checkpoint_record(path: Path) -> Mapping[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
        raise RecordError(f"{path}: cannot be read ({error})") from None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != CHECKPOINT_SCHEMA_VERSION:
        raise RecordError(f"{path}: /schema_version: {version!r}, but this report reads {CHECKPOINT_SCHEMA_VERSION}")
    return dict(record)


def _weights_bytes(folder: Path) -> int | None:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None
