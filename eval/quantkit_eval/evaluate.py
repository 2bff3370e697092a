"""One model on its suites: asks, measures and leaves the records in a folder."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit_eval.answer_log import ANSWERS_FILE, AnswerLog
from quantkit_eval.errors import ModelOutputError, NotOfferedError, OptionError, RecordError
from quantkit_eval.file_lock import hold_records
from quantkit_eval.machine import describe_machine
from quantkit_eval.protocol import LoadTarget, Model
from quantkit_eval.record_types import Result, Sample, SuiteRecord
from quantkit_eval.records import (
    REFERENCE_FILE,
    RESULT_FILE,
    SAMPLES_FILE,
    SCHEMA_VERSION,
    check_writable,
    utc_now,
    write_result,
    write_samples,
)
from quantkit_eval.reference import Reference
from quantkit_eval.suites import BATCH_ITEMS, Progress, Suite, SuiteRun, load_suite
from quantkit_eval.suites.item_counts import count_items

WORKING = ".evaluate-"  # begins the name of the folder where an evaluation makes its records
GREEDY = {"temperature": 0.0, "top_p": 1.0}


def evaluate(
    model: Model,
    suites: Mapping[str, Mapping[str, Any]],
    seed: int,
    out: Path,
    reference: Path | None = None,
    progress: Progress | None = None,
    batch_items: int = BATCH_ITEMS,
    *,
    keep_answers: bool = False,
    resume: bool = False,
) -> Result:
    """Evaluate a model and write samples.jsonl, result.json and, as a baseline with ``nll``, nll.safetensors.

    The files appear together at the end, result.json last; an evaluation that stops half-way changes no record and
    leaves no folder that was not there, unless there are answers to keep. A suite that a server cannot serve is left
    out, and result.json says why.

    Args:
        model: what is evaluated.
        suites: name of a suite -> its options; an empty mapping takes the defaults. The option ``kind: file`` makes a
            suite of the user's own prompts under that name (``suites.file``). A name that ends with ``+constrained`` is
            that suite with its answers forced into the form of each item.
        seed: of the items; a candidate needs the seed of its baseline.
        out: folder for the records, made if need be; earlier records in it are replaced.
        reference: folder of the baseline's records (or its nll.safetensors), which the suite ``nll`` reads; None if
            this is the baseline.
        progress: called with the suite, the items done and the items in all.
        batch_items: items handed to the model at once. What a model answers should not depend on it, and the noise
            floor is how much it does: evaluate the baseline a second time with another number (``compare``'s control).
        keep_answers: keep what the model answered until the records are complete, in answers.partial.jsonl.
        resume: go on with the answers that an evaluation of the same model left there; what is not there is asked for.

    Returns:
        The content of result.json.

    Raises:
        OptionError: no suite, an unknown one, or wrong options.
        RecordError, ReferenceMismatch: the reference is missing, damaged or belongs to something else.
        ModelOutputError: the model broke the protocol.
        TargetError: a server failed.
        NotOfferedError: it can serve none of the suites.
    """
    if batch_items < 1:
        raise OptionError(f"batch_items={batch_items} must be at least 1")
    check_evaluation(suites, out, reference)
    runners = {name: load_suite(name, options.get("kind")) for name, options in suites.items()}
    party = describe_model(model)
    with _working_folder(out) as folder:
        answers = AnswerLog(out / ANSWERS_FILE, party, resume=resume) if keep_answers or resume else None
        runs = {
            suite: SuiteRun(
                suite, model, options, seed, folder, reference, _report_to(progress, suite), batch_items, answers
            )
            for suite, options in suites.items()
        }
        samples, records, not_offered = _ask(runners, runs, party["model"].get("name") or "the model")
        samples_sha256 = write_samples(folder / SAMPLES_FILE, samples)
        result: Result = {
            "schema_version": SCHEMA_VERSION,
            "created": utc_now(),
            "model": party["model"],
            "engine": describe_model(model)["engine"],  # what a server takes is known once it has answered
            "template_hash": party["template_hash"],
            "sampling": GREEDY,
            "seed": seed,
            "machine": describe_machine(),
            "samples_sha256": samples_sha256,
            "suites": records,
        }
        if not_offered:
            result["not_offered"] = not_offered
        write_result(folder / RESULT_FILE, result)
        _replace_records(folder, out)
        if answers is not None:
            answers.remove()
    return result


def _ask(
    runners: Mapping[str, Suite], runs: Mapping[str, SuiteRun], who: str
) -> tuple[list[Sample], dict[str, SuiteRecord], dict[str, str]]:
    """Run every suite: the samples of all, the record of each, and of those that cannot be run why.

    Raises:
        ModelOutputError: with the model and the suite named.
        NotOfferedError: no suite can be run.
    """
    samples: list[Sample] = []
    records: dict[str, SuiteRecord] = {}
    not_offered: dict[str, str] = {}
    for suite, run in runners.items():
        try:
            outcome = run(runs[suite])
        except ModelOutputError as error:
            raise ModelOutputError(f"{who}, suite {suite!r}: {error.message}", fix=error.fix) from error
        except NotOfferedError as error:
            not_offered[suite] = str(error)
            continue
        samples += outcome.samples
        records[suite] = outcome.record
    if not records:
        raise NotOfferedError(f"none of the suites can be run: {'; '.join(not_offered.values())}")
    return samples, records, not_offered


def check_evaluation(suites: Mapping[str, Mapping[str, Any]], out: Path, reference: Path | None = None) -> None:
    """Refuse before a model is loaded what ``evaluate`` would refuse, and makes nothing.

    Raises:
        OptionError: no suite, an unknown one, wrong options, or ``out`` holds the reference.
        RecordError: the reference is missing or damaged, or ``out`` cannot be written to.
    """
    if not suites:
        raise OptionError("no suite to evaluate", fix="Name at least one")
    if reference and out.resolve() in (reference.resolve(), reference.resolve().parent):
        raise OptionError(
            f"{out} holds the reference and cannot take the candidate's records", fix="Name another folder"
        )
    check_suites(suites)
    check_writable(out / RESULT_FILE)
    if reference:
        Reference(reference)


def check_suites(suites: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse before the work what an evaluation would refuse in its middle.

    Args:
        suites: as ``evaluate`` takes them.

    Raises:
        OptionError: an unknown suite, wrong options, or a file of items or a text that cannot be read.
    """
    for name, options in suites.items():
        count_items(name, options)


@contextmanager
def _working_folder(out: Path) -> Iterator[Path]:
    """A folder inside ``out`` that goes at the end; of ``out`` and its parents goes what was made here and is empty."""
    with hold_records(out):
        for left in out.glob(f"{WORKING}*"):  # of an evaluation that was killed; the lock says that none is running
            shutil.rmtree(left, ignore_errors=True)
        try:
            temporary = tempfile.TemporaryDirectory(prefix=WORKING, dir=out)
        except OSError as error:
            raise RecordError(f"{out}: cannot be written ({error.strerror})", fix="Name another folder") from error
        with temporary as name:
            yield Path(name)


def describe_model(model: Model | LoadTarget) -> dict[str, Any]:
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
