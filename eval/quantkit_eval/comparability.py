"""Whether two evaluations may be compared at all: same items, prompts, template, sampling, and the right reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit_eval.errors import IncomparableResults, RecordError
from quantkit_eval.protocol import MESSAGES_ONLY, RENDERED_BY_SERVER
from quantkit_eval.record_types import Load, Party, Result, Sample, SuiteRecord, Throughput
from quantkit_eval.records import RESULT_FILE, SAMPLES_FILE, read_result, read_samples

SAME_OPTIONS = "Evaluate both with the same options and seed"
SAME_TEMPLATE = (
    "Give both models the tokenizer files and the chat template of the original, and evaluate the changed one again"
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The records of one model: result.json, and the samples of samples.jsonl by suite."""

    folder: Path
    result: Result
    samples: dict[str, list[Sample]]

    @classmethod
    def read(cls, folder: Path) -> "Evaluation":
        """Read a folder that ``evaluate`` wrote.

        Raises:
            RecordError: a file is missing, damaged or was changed, or the two do not belong together.
        """
        result = read_result(folder / RESULT_FILE)
        samples: dict[str, list[Sample]] = {suite: [] for suite in result["suites"]}
        for sample in read_samples(folder / SAMPLES_FILE, result["samples_sha256"]):
            samples.setdefault(sample["suite"], []).append(sample)
        counts = {suite: len(lines) for suite, lines in samples.items()}
        expected = {suite: record["num_items"] for suite, record in result["suites"].items()}
        if counts != expected:
            raise RecordError(f"{folder}: {SAMPLES_FILE} has {counts} items, {RESULT_FILE} says {expected}")
        for suite, record in result["suites"].items():
            _check_suite(folder, suite, record, samples[suite])
        return cls(folder, result, samples)

    def all_samples(self) -> list[Sample]:
        """Of all suites, one after the other."""
        return [sample for lines in self.samples.values() for sample in lines]

    def party(self) -> Party:
        """Who was evaluated, for the verdict."""
        return {key: value for key, value in self.result.items() if key not in ("schema_version", "suites")}

    def measures_divergence(self) -> bool:
        """Whether ``nll`` was run against a reference."""
        return "nll" in self.result["suites"] and "kl_mean_nats" in self.result["suites"]["nll"]["metrics"]


def _check_suite(folder: Path, suite: str, record: SuiteRecord, samples: Sequence[Sample]) -> None:
    """What a comparison looks up in the metrics and in each sample has to be there."""
    primary = record["primary_metric"]
    if primary is not None and primary not in record["metrics"]:
        raise RecordError(f"{folder / RESULT_FILE}: /suites/{suite}/metrics: the primary metric {primary!r} is missing")
    judged = "kl_mean_nats" if "kl_mean_nats" in record["metrics"] else primary
    for sample in samples:
        if judged is not None and sample["metrics"].get(judged) is None:
            raise RecordError(
                f"{folder / SAMPLES_FILE}: item {sample['id']!r} of suite {suite!r} lacks {judged}",
                fix="Evaluate the model again",
            )


def shared_suites(baseline: Evaluation, candidate: Evaluation) -> list[str]:
    """Suites that both were evaluated on, in the baseline's order."""
    return [suite for suite in baseline.result["suites"] if suite in candidate.result["suites"]]


def check_comparable(baseline: Evaluation, candidate: Evaluation) -> None:
    """Refuse two results that do not rest on the same input.

    Raises:
        IncomparableResults: names what differs, with both values.
    """
    _check_templates(baseline.result["template_hash"], candidate.result["template_hash"])
    _check_equal("sampling", baseline.result["sampling"], candidate.result["sampling"])
    for suite in shared_suites(baseline, candidate):
        first, second = baseline.result["suites"][suite], candidate.result["suites"][suite]
        _check_equal(f"the options of suite {suite!r}", first["options"], second["options"])
        _check_equal(f"items_hash of suite {suite!r}", first["items_hash"], second["items_hash"])
        what = f"num_items of suite {suite!r} (windows, where the tokenizer makes them)"
        _check_equal(what, first["num_items"], second["num_items"])
        what = f"the primary metric of suite {suite!r}"
        _check_equal(what, first["primary_metric"], second["primary_metric"])
        for mine, theirs in zip(baseline.samples[suite], candidate.samples[suite], strict=True):
            _check_equal(f"the id of an item of suite {suite!r}", mine["id"], theirs["id"])
            what = f"prompt_hash of {suite} item {mine['id']!r} (made by template and tokenizer)"
            _check_equal(what, mine["prompt_hash"], theirs["prompt_hash"], SAME_TEMPLATE)
    if "nll" in baseline.result["suites"] and candidate.measures_divergence():
        first, second = baseline.result["suites"]["nll"], candidate.result["suites"]["nll"]
        of_original = "that of the original against which the baseline was measured"
        right = of_original if baseline.measures_divergence() else str(baseline.folder)
        fix = f"Evaluate the candidate again with --reference {right}"
        what = "reference_sha256 of suite 'nll' (so KL is not the one to this baseline)"
        _check_equal(what, first.get("reference_sha256"), second.get("reference_sha256"), fix)


def check_measured_models(throughput: Throughput, baseline: Evaluation, candidate: Evaluation) -> None:
    """Refuse a throughput that belongs to other models. Raises IncomparableResults."""
    for side, measured, evaluation in (
        ("baseline", throughput["baseline"]["model"], baseline),
        ("candidate", throughput["candidate"]["model"], candidate),
    ):
        if measured != evaluation.result["model"]:
            raise IncomparableResults(
                f"the throughput is of another {side}: {measured}, but evaluated was {evaluation.result['model']}",
                fix="Measure it again",
            )


def check_loaded_models(load: Load, baseline: Evaluation, candidate: Evaluation) -> None:
    """Refuse a load that is not of this baseline, or not of this candidate. Raises IncomparableResults."""
    first, *others = [party["model"] for party in load["models"]]
    if first != baseline.result["model"] or candidate.result["model"] not in others:
        raise IncomparableResults(
            f"the load is of other models: {[model.get('name') for model in (first, *others)]}", fix="Measure it again"
        )


def _check_templates(baseline: str, candidate: str) -> None:
    """Where a server rendered the prompts, its template has no hash; what it made of each item has, and is compared."""
    both = (baseline, candidate)
    if RENDERED_BY_SERVER not in both or MESSAGES_ONLY in both:
        _check_equal("template_hash", baseline, candidate, SAME_TEMPLATE)


def _check_equal(what: str, baseline: object, candidate: object, fix: str = SAME_OPTIONS) -> None:
    if baseline != candidate:
        raise IncomparableResults(
            f"the results cannot be compared: {what} is {baseline!r} for the baseline, {candidate!r} for the candidate",
            fix=fix,
        )
