"""What a report is made from: the records of one run, and the checkpoint's own record if there is one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from quantkit_eval.comparability import Evaluation, check_loaded_models, check_measured_models
from quantkit_eval.errors import RecordError
from quantkit_eval.record_types import Load, Result, Sample, Throughput, Verdict
from quantkit_eval.records import (
    LOAD_FILE,
    RESULT_FILE,
    THROUGHPUT_FILE,
    VERDICT_FILE,
    read_load,
    read_throughput,
    read_verdict,
)
from quantkit_eval.report.quantities import shorten
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
        load: speed of both (and perhaps others) under load, or None likewise.
        checkpoint: quantkit.json (recipe, layers, calibration, versions), or None if the candidate has none.
        weights_bytes: size of the checkpoint's safetensors files; None without a checkpoint folder.
    """

    verdict: Verdict
    baseline: Result
    candidate: Result
    baseline_samples: Sequence[Sample] = ()
    candidate_samples: Sequence[Sample] = ()
    throughput: Throughput | None = None
    load: Load | None = None
    checkpoint: Mapping[str, Any] | None = None
    weights_bytes: int | None = None

    def made_visible(self) -> "ReportInput":
        """A copy whose texts hold no control, direction or unencodable character (see ``visible``)."""
        return ReportInput(**{field.name: visible_record(getattr(self, field.name)) for field in fields(self)})


def load_report_input(records: Path, checkpoint: Path | None = None, checkpoint_hash: str | None = None) -> ReportInput:
    """Read the records of a run, if they belong together.

    Args:
        records: folder with verdict.json, baseline/, candidate/ and perhaps throughput.json and load.json.
        checkpoint: folder of the candidate, for its quantkit.json and the size of its weights, or a .gguf file with
            NAME.quantkit.json beside it, also if only its parts are there. Without it, or if it
            has no quantkit.json (it came from elsewhere, or is the original), the report has no layers and no recipe.
        checkpoint_hash: of that folder, as ``Model.describe()`` gives it; it has to be the candidate's. None is for a
            caller that evaluated the folder itself.

    Raises:
        RecordError: a record is missing, damaged or does not fit its schema, or the verdict or the checkpoint is not
            about these records.
        IncomparableResults: the throughput or the load is of other models.
    """
    if not (records / VERDICT_FILE).exists():
        raise RecordError(
            f"{records / VERDICT_FILE}: no such file",
            fix=f"Write it with `quantkit compare {records / 'baseline'} {records / 'candidate'} -r RECIPE "
            f"-o {records / VERDICT_FILE}`",
        )
    verdict = read_verdict(records / VERDICT_FILE)
    baseline, candidate = (_read_side(records, verdict, side) for side in ("baseline", "candidate"))
    judged = candidate.result["model"].get("checkpoint_hash")
    if checkpoint_hash not in (None, judged):
        raise RecordError(
            f"{checkpoint} is not the candidate of this verdict: its hash is {str(checkpoint_hash)[:16]}, "
            f"judged was {str(judged)[:16]}",
            fix="Name the folder that was evaluated",
        )
    speeds = records / THROUGHPUT_FILE
    throughput = read_throughput(speeds) if speeds.exists() else None
    if throughput:
        check_measured_models(throughput, baseline, candidate)
    load = read_load(records / LOAD_FILE) if (records / LOAD_FILE).exists() else None
    if load:
        check_loaded_models(load, baseline, candidate)
    return ReportInput(
        verdict=verdict,
        baseline=baseline.result,
        candidate=candidate.result,
        baseline_samples=baseline.all_samples(),
        candidate_samples=candidate.all_samples(),
        throughput=throughput,
        load=load,
        checkpoint=_read_checkpoint_record(_record_path(checkpoint)) if checkpoint else None,
        weights_bytes=_weights_bytes(checkpoint) if checkpoint else None,
    )


def _read_side(records: Path, verdict: Verdict, side: Literal["baseline", "candidate"]) -> Evaluation:
    """The records of one model, if they are those that the verdict is about."""
    folder = records / side
    if not (folder / RESULT_FILE).exists():
        raise RecordError(
            f"{folder / RESULT_FILE}: no such file",
            fix=f"A report needs the records that were judged as baseline/ and candidate/ beside {VERDICT_FILE}",
        )
    evaluation = Evaluation.read(folder)
    party = evaluation.party()
    differs = next((key for key in party if verdict[side].get(key) != party[key]), None)
    if differs:
        raise RecordError(
            f"{records / VERDICT_FILE} is not about {folder}: its {side} has {differs} "
            f"{shorten(str(verdict[side].get(differs)), 80)}, {RESULT_FILE} has {shorten(str(party[differs]), 80)}",
            fix="Compare these records again",
        )
    return evaluation


def _record_path(checkpoint: Path) -> Path:
    """quantkit.json of a folder, NAME.quantkit.json of NAME.gguf."""
    is_file = checkpoint.suffix == ".gguf"
    return checkpoint.with_suffix(f".{CHECKPOINT_RECORD}") if is_file else checkpoint / CHECKPOINT_RECORD


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
