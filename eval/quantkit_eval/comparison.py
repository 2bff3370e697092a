"""Several candidates against one baseline: a row each, and which of them nothing beats in size, quality and speed.

Every candidate gets the verdict that it would get alone, so that adding another one changes nobody's. The front goes by
the measured values; differences smaller than the intervals of the verdicts are chance.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit_eval.comparability import Evaluation, check_comparable, shared_suites
from quantkit_eval.compare import compare
from quantkit_eval.errors import OptionError
from quantkit_eval.pairing import primary_metric
from quantkit_eval.record_types import Comparison, ComparisonRow, Throughput, Verdict
from quantkit_eval.records import SCHEMA_VERSION, THROUGHPUT_FILE, read_throughput, utc_now

SPEED_BATCH = "decode_batch_1"


def compare_several(
    baseline: Path, candidates: Sequence[Path], gates: Mapping[str, Any], control: Path | None = None
) -> Comparison:
    """Judge each candidate against the baseline and put them side by side.

    The speed of a candidate is taken from a throughput.json in its folder, or beside it, that is of these two models.

    Args:
        baseline: folder of the baseline's records.
        candidates: folders of the candidates' records, all evaluated on the same suites.
        gates: as in a recipe.
        control: see ``compare.compare``.

    Returns:
        The content of comparison.json, for ``records.write_comparison``. ``exit_code`` is the worst of the verdicts'.

    Raises:
        OptionError: no candidate, one twice, or other suites than the first has; a gate that was not measured.
        RecordError: a record is missing or damaged.
        IncomparableResults: items, prompts, template, sampling, reference or models do not match.
    """
    folders = [folder.resolve() for folder in (baseline, *candidates)]
    if not candidates or len(set(folders)) < len(folders):
        raise OptionError("needs a baseline and candidates in folders of their own", fix="Name each folder once")
    before = Evaluation.read(baseline)
    after = [Evaluation.read(folder) for folder in candidates]
    suites = _common_suites(before, after)
    for candidate in after:
        check_comparable(before, candidate)
    speeds = [find_throughput(before, candidate) for candidate in after]
    verdicts = [
        compare(baseline, folder, gates, path, control) for folder, (path, _) in zip(candidates, speeds, strict=True)
    ]
    rows = [_row(before, suites, None, None)]
    for candidate, verdict, (_, speed) in zip(after, verdicts, speeds, strict=True):
        rows.append(_row(candidate, suites, verdict, speed))
    _mark_front(rows)
    return {
        "schema_version": SCHEMA_VERSION,
        "created": utc_now(),
        "exit_code": max((verdict["exit_code"] for verdict in verdicts), key=[0, 4, 3].index),
        "suites": suites,
        "baseline": rows[0],
        "candidates": rows[1:],
    }


def _common_suites(baseline: Evaluation, candidates: Sequence[Evaluation]) -> list[str]:
    """The graded suites, which all must share: means over other suites cannot be ranked."""
    suites = [suite for suite in baseline.result["suites"] if primary_metric(suite, baseline)]
    for candidate in candidates:
        shared = shared_suites(baseline, candidate)
        missing = [suite for suite in suites if suite not in shared]
        if missing:
            raise OptionError(
                f"{candidate.folder} was not evaluated on {', '.join(missing)}, as {baseline.folder} was",
                fix="Evaluate all on the same suites",
            )
    return suites


def find_throughput(baseline: Evaluation, candidate: Evaluation) -> tuple[Path | None, float | None]:
    """throughput.json of these two models in the candidate's folder or beside it, and the ratio at batch 1, if any."""
    for folder in (candidate.folder, candidate.folder.parent):
        path = folder / THROUGHPUT_FILE
        if not path.exists():
            continue
        throughput = read_throughput(path)
        if _is_of(throughput, baseline, candidate):
            batch = throughput["batches"].get(SPEED_BATCH)
            return path, batch["ratio"]["value"] if batch else None
    return None, None


def _is_of(throughput: Throughput, baseline: Evaluation, candidate: Evaluation) -> bool:
    models = (throughput["baseline"]["model"], throughput["candidate"]["model"])
    return models == (baseline.result["model"], candidate.result["model"])


def _row(evaluation: Evaluation, suites: Sequence[str], verdict: Verdict | None, speed: float | None) -> ComparisonRow:
    found = evaluation.result["suites"]
    scores = {suite: found[suite]["metrics"][str(found[suite]["primary_metric"])]["value"] for suite in suites}
    known = [score for score in scores.values() if score is not None]
    kl = found["nll"]["metrics"].get("kl_mean_nats") if "nll" in found else None
    model = evaluation.result["model"]
    return {
        "folder": str(evaluation.folder),
        "name": str(model.get("name") or evaluation.folder.name),
        "scheme": model.get("scheme"),
        "checkpoint_hash": model.get("checkpoint_hash"),
        "weight_bytes": model.get("weight_bytes"),
        "scores": scores,
        "quality": sum(known) / len(known) if known else None,
        "kl_mean_nats": kl["value"] if kl else None,
        "speed_ratio": speed,
        "on_front": False,
        "verdict": verdict["verdict"] if verdict else None,
        "reason": verdict["reason"] if verdict else None,
        "gates": {gate["name"]: gate["verdict"] for gate in verdict["gates"]} if verdict else {},
    }


def _mark_front(rows: Sequence[ComparisonRow]) -> None:
    """Mark the rows that no other beats; speed counts only if it is known of all."""
    with_speed = all(row["speed_ratio"] is not None for row in rows[1:])
    ranks: list[tuple[float, ...] | None] = []
    for index, row in enumerate(rows):
        if row["weight_bytes"] is None or row["quality"] is None:
            ranks.append(None)  # its place is unknown
            continue
        speed = (1.0 if index == 0 else float(row["speed_ratio"] or 0.0)) if with_speed else 0.0
        ranks.append((-float(row["weight_bytes"]), row["quality"], speed))
    for row, rank in zip(rows, ranks, strict=True):
        row["on_front"] = rank is not None and not any(other and _beats(other, rank) for other in ranks)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
