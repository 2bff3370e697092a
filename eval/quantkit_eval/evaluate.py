"""One model on its suites: asks, measures and leaves the records in a folder."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit_eval.errors import ModelOutputError, OptionError
from quantkit_eval.machine import describe_machine
from quantkit_eval.protocol import Model
from quantkit_eval.records import (
    RESULT_FILE,
    SAMPLES_FILE,
    SCHEMA_VERSION,
    Result,
    Sample,
    SuiteRecord,
    utc_now,
    write_result,
    write_samples,
)
from quantkit_eval.reference import REFERENCE_FILE
from quantkit_eval.suites import Progress, SuiteRun, load_suite

GREEDY = {"temperature": 0.0, "top_p": 1.0}


def evaluate(
    model: Model,
    suites: Mapping[str, Mapping[str, Any]],
    seed: int,
    out: Path,
    reference: Path | None = None,
    progress: Progress | None = None,
) -> Result:
    """Evaluate a model and write samples.jsonl, result.json and, as a baseline with ``nll``, nll.safetensors.

    The files appear together at the end, result.json last; an evaluation that stops half-way changes no record.

    Args:
        model: what is evaluated.
        suites: name of a suite -> its options; an empty mapping takes the defaults.
        seed: of the items; a candidate needs the seed of its baseline.
        out: folder for the records, made if need be; earlier records in it are replaced.
        reference: folder of the baseline's records (or its nll.safetensors), which the suite ``nll`` reads; None if
            this is the baseline.
        progress: called with the suite, the items done and the items in all.

    Returns:
        The content of result.json.

    Raises:
        OptionError: no suite, an unknown one, or wrong options.
        RecordError, ReferenceMismatch: the reference is missing, damaged or belongs to something else.
        ModelOutputError: the model broke the protocol.
    """
    if not suites:
        raise OptionError("no suite to evaluate", fix="Name at least one")
    if reference and out.resolve() in (reference.resolve(), reference.resolve().parent):
        raise OptionError(
            f"{out} holds the reference and cannot take the candidate's records", fix="Name another folder"
        )
    runners = {name: load_suite(name) for name in suites}  # a typo shows before the work
    party = describe_model(model)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=out) as name:
        folder = Path(name)
        samples: list[Sample] = []
        records: dict[str, SuiteRecord] = {}
        for suite, run in runners.items():
            outcome = run(SuiteRun(model, suites[suite], seed, folder, reference, _report_to(progress, suite)))
            samples += outcome.samples
            records[suite] = outcome.record
        result: Result = {
            "schema_version": SCHEMA_VERSION,
            "created": utc_now(),
            "model": party["model"],
            "engine": party["engine"],
            "template_hash": party["template_hash"],
            "sampling": GREEDY,
            "seed": seed,
            "machine": describe_machine(),
            "suites": records,
        }
        write_samples(folder / SAMPLES_FILE, samples)
        write_result(folder / RESULT_FILE, result)
        _replace_records(folder, out)
    return result


def describe_model(model: Model) -> dict[str, Any]:
    """``Model.describe()``, with its keys checked. Raises ModelOutputError if one is missing or of a wrong kind."""
    party = model.describe()
    for key, kind in (("model", dict), ("engine", dict), ("template_hash", str)):
        if not isinstance(party.get(key), kind):
            raise ModelOutputError(f"describe() of the model gave no {kind.__name__} {key!r}, only {sorted(party)}")
    return party


def _replace_records(folder: Path, out: Path) -> None:
    """Move every file of folder to out in place of all earlier records; while they change there is no result.json."""
    for name in (RESULT_FILE, SAMPLES_FILE, REFERENCE_FILE):
        (out / name).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == RESULT_FILE):
        path.replace(out / path.name)


def _report_to(progress: Progress | None, suite: str) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if progress:
            progress(suite, done, total)

    return report
