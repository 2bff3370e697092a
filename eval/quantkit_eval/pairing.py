"""Two results item by item: who got which item right, and where the texts part."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from quantkit_eval.comparability import Evaluation, shared_suites
from quantkit_eval.reasons import PairedCounts
from quantkit_eval.record_types import Changes, Flipped, NoiseFloor, Sample


@dataclass(frozen=True, slots=True)
class Pair:
    """An item with the answers of both models, and whether each is right."""

    baseline: Sample
    candidate: Sample
    baseline_right: bool
    candidate_right: bool

    @property
    def divergence(self) -> int | None:
        """Characters that both outputs share from the start; None if they are equal."""
        return first_divergence(self.baseline["output"], self.candidate["output"])


def first_divergence(one: str, other: str) -> int | None:
    """Characters that two texts share from the start; None if they are equal."""
    if one == other:
        return None
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def primary_metric(suite: str, evaluation: Evaluation) -> str | None:
    """The right-or-wrong metric of a suite's items; None if the suite has none."""
    return evaluation.result["suites"][suite]["primary_metric"]


def graded_suites(baseline: Evaluation, candidate: Evaluation) -> list[str]:
    """Suites with right and wrong answers that both were evaluated on."""
    return [suite for suite in shared_suites(baseline, candidate) if primary_metric(suite, baseline)]


def pair_up(suite: str, baseline: Evaluation, candidate: Evaluation) -> list[Pair]:
    """Every item of a suite with right and wrong answers."""
    metric = primary_metric(suite, baseline)
    assert metric is not None  # the callers ask for graded suites only
    return [
        Pair(first, second, bool(first["metrics"][metric]), bool(second["metrics"][metric]))
        for first, second in zip(baseline.samples[suite], candidate.samples[suite], strict=True)
    ]


def count(pairs: Sequence[Pair]) -> PairedCounts:
    """The items by who got them right."""
    return PairedCounts(
        both=sum(pair.baseline_right and pair.candidate_right for pair in pairs),
        improved=sum(pair.candidate_right and not pair.baseline_right for pair in pairs),
        regressed=sum(pair.baseline_right and not pair.candidate_right for pair in pairs),
        n=len(pairs),
    )


def changes(baseline: Evaluation, candidate: Evaluation) -> list[Changes]:
    """How the answers of each graded suite differ: more of them change than become right or wrong."""
    found: list[Changes] = []
    for suite in graded_suites(baseline, candidate):
        pairs = pair_up(suite, baseline, candidate)
        counts = count(pairs)
        places = [place for pair in pairs if (place := pair.divergence) is not None]
        found.append(
            {
                "suite": suite,
                "n": counts.n,
                "changed": len(places),
                "improved": counts.improved,
                "regressed": counts.regressed,
                "median_divergence": float(median(places)) if places else None,
            }
        )
    return found


def noise_floor(baseline: Evaluation, control: Evaluation) -> NoiseFloor:
    """What differs between two evaluations of one model."""
    nll = control.result["suites"].get("nll")
    kl = nll["metrics"].get("kl_mean_nats") if nll else None
    return {"changes": changes(baseline, control), "kl_mean_nats": kl["value"] if kl else None}


def flipped(suite: str, baseline: Evaluation, candidate: Evaluation) -> list[Flipped]:
    """The items that only one model got right, regressed ones first."""
    items: list[Flipped] = [
        {
            "suite": suite,
            "id": pair.baseline["id"],
            "prompt": pair.baseline["prompt"],
            "gold": pair.baseline["gold"],
            "baseline_output": pair.baseline["output"],
            "candidate_output": pair.candidate["output"],
            "direction": "regressed" if pair.baseline_right else "improved",
            "divergence": pair.divergence or 0,
        }
        for pair in pair_up(suite, baseline, candidate)
        if pair.baseline_right != pair.candidate_right
    ]
    return sorted(items, key=lambda item: item["direction"] == "improved")
