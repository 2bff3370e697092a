"""What must hold: the gates of a recipe, and how one number is judged.

Every judgement has three outcomes, and a small evaluation cannot pass by accident: without enough evidence the outcome
is inconclusive, with the number of items that would probably decide. Each reason is a sentence for somebody who has
never heard of the test behind it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from quantkit_eval.errors import OptionError
from quantkit_eval.records import Gate, Outcome, ThroughputBatch
from quantkit_eval.sample_size import items_needed, means_needed, pairs_needed
from quantkit_eval.statistics import ALPHA, Estimate, bootstrap_mean, is_non_inferior, mcnemar_p, tango_interval
from quantkit_eval.suites import PRIMARY_METRICS

CONFIDENCE = 1 - 2 * ALPHA  # of the two-sided interval; each end alone errs with ALPHA
SURE = f"with {100 * (1 - ALPHA):.0f} % confidence"
METRIC_WORDS = {"exact": "exactly right"}


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of a recipe; what is not named is listed as unjudged.

    Attributes:
        suites: that must have been run on both models.
        max_drop_pp: suite -> largest tolerable drop of its right answers, percentage points.
        max_kl_mean_nats: largest tolerable mean KL(baseline || candidate), nats a token.
        min_throughput_ratio: batch (``decode_batch_1``) -> smallest tolerable candidate / baseline.
    """

    suites: tuple[str, ...] = ()
    max_drop_pp: Mapping[str, float] = field(default_factory=dict)
    max_kl_mean_nats: float | None = None
    min_throughput_ratio: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, gates: Mapping[str, Any]) -> "Gates":
        """From the mapping that a recipe holds.

        Raises:
            OptionError: an unknown key, a limit that is no number above 0, or a suite that has no right answers.
        """
        known = [item.name for item in fields(cls)]
        for key in gates:
            if key not in known:
                raise OptionError(f"unknown gate {key!r}", fix=f"Choose from {', '.join(known)}")
        drops = dict(gates.get("max_drop_pp") or {})
        for suite, limit in drops.items():
            if suite not in PRIMARY_METRICS:
                raise OptionError(
                    f"gate max_drop_pp.{suite}: no suite with right and wrong answers has that name",
                    fix=f"Choose from {', '.join(PRIMARY_METRICS)}",
                )
            _check_limit(f"max_drop_pp.{suite}", limit, 100.0)
        kl = gates.get("max_kl_mean_nats")
        if kl is not None:
            _check_limit("max_kl_mean_nats", kl)
        ratios = dict(gates.get("min_throughput_ratio") or {})
        for batch, limit in ratios.items():
            _check_limit(f"min_throughput_ratio.{batch}", limit)
        return cls(tuple(gates.get("suites") or ()), drops, kl, ratios)


def _check_limit(name: str, limit: object, below: float = float("inf")) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < below:
        end = f" and below {below:g}" if below < float("inf") else ""
        raise OptionError(f"gate {name} must be a number above 0{end}, not {limit!r}")


@dataclass(frozen=True, slots=True)
class PairedCounts:
    """Items of one suite, by who got them right."""

    both: int
    improved: int
    regressed: int
    n: int

    @property
    def p_value(self) -> float:
        """Of the one-sided exact McNemar test."""
        return mcnemar_p(self.improved, self.regressed)


def judge_drop(suite: str, counts: PairedCounts, max_drop_pp: float, p_holm: float) -> Gate:
    """Non-inferiority of the share of right answers.

    Pass if the upper bound of the drop is below the limit; fail if it is not and McNemar's test, corrected for the
    number of such gates, says that the drop is no accident; else inconclusive.
    """
    metric, n, margin = PRIMARY_METRICS[suite], counts.n, max_drop_pp / 100
    low, high = tango_interval(counts.improved, counts.regressed, n, CONFIDENCE)
    baseline = (counts.both + counts.regressed) / n if n else None
    candidate = (counts.both + counts.improved) / n if n else None
    difference = (counts.improved - counts.regressed) / n if n else None
    passes = is_non_inferior(counts.improved, counts.regressed, n, margin)
    verdict: Outcome = "pass" if passes else "fail" if p_holm < ALPHA else "inconclusive"
    needed = items_needed(counts.improved, counts.regressed, n, margin) if verdict == "inconclusive" else None
    return {
        "name": f"{suite}.{metric}",
        "suite": suite,
        "metric": metric,
        "kind": "non_inferiority",
        "baseline": baseline,
        "candidate": candidate,
        "difference": difference,
        "value": difference,
        "interval": [low, high] if n else None,
        "confidence": CONFIDENCE if n else None,
        "test": "one-sided exact McNemar test, Holm-corrected; Tango score interval",
        "p_value": counts.p_value,
        "p_holm": p_holm,
        "limit": margin,
        "unit": "fraction",
        "direction": "higher_is_better",
        "n": n,
        "discordant": {"improved": counts.improved, "regressed": counts.regressed},
        "verdict": verdict,
        "reason": _explain_drop(suite, counts, -low, margin, verdict, needed),
        "items_needed": needed,
    }


def _explain_drop(
    suite: str, counts: PairedCounts, largest: float, margin: float, verdict: Outcome, needed: int | None
) -> str:
    if counts.n == 0:
        return f"No item of {suite} was evaluated, so nothing can be said about it."
    before, after = (counts.both + counts.regressed) / counts.n, (counts.both + counts.improved) / counts.n
    words = METRIC_WORDS[PRIMARY_METRICS[suite]]
    facts = f"Of {counts.n} {suite} answers, {_percent(before)} were {words} before and {_percent(after)} after"
    drop, limit = f"{max(0.0, 100 * largest):.1f}", f"{100 * margin:g}"
    if verdict == "pass":
        return f"{facts}; {SURE}, the loss is at most {drop} percentage points, and {limit} are allowed."
    beyond = f"the loss may be as large as {drop} percentage points, where {limit} are allowed"
    if verdict == "fail":
        flips = f"{counts.regressed} got worse and {counts.improved} better"
        return f"{facts}; {flips}, too one-sided to be chance, and {beyond}."
    return f"{facts}; {beyond}, but so few items cannot tell loss from chance: {_about(needed)} items would."


def judge_kl(window_means: Sequence[float], window_tokens: Sequence[int], max_kl_mean_nats: float) -> Gate:
    """Upper bound on the mean divergence: pass if the interval ends below the limit, fail if it starts above it."""
    estimate = bootstrap_mean(window_means, weights=window_tokens, confidence=CONFIDENCE)
    (low, high), limit = estimate.interval, max_kl_mean_nats
    verdict: Outcome = "pass" if high <= limit else "fail" if low > limit else "inconclusive"
    half_width = high - estimate.value if estimate.value <= limit else estimate.value - low
    needed = means_needed(estimate.value, half_width, estimate.n, limit) if verdict == "inconclusive" else None
    known = estimate.n > 1
    return {
        "name": "nll.kl_mean_nats",
        "suite": "nll",
        "metric": "kl_mean_nats",
        "kind": "upper_bound",
        "baseline": None,
        "candidate": estimate.value,
        "difference": None,
        "value": estimate.value,
        "interval": [low, high] if known else None,
        "confidence": CONFIDENCE if known else None,
        "test": "studentized bootstrap interval over windows",
        "p_value": None,
        "p_holm": None,
        "limit": limit,
        "unit": "nats_per_token",
        "direction": "lower_is_better",
        "n": estimate.n,
        "discordant": None,
        "verdict": verdict,
        "reason": _explain_kl(estimate, limit, verdict, needed),
        "items_needed": needed,
    }


def _explain_kl(estimate: Estimate, limit: float, verdict: Outcome, needed: int | None) -> str:
    low, high = estimate.interval
    facts = f"The predictions differ from the original's by {estimate.value:.3f} nats a token on average"
    if verdict == "pass":
        return f"{facts}; {SURE}, by no more than {high:.3f}, and {limit:g} is allowed."
    if verdict == "fail":
        return f"{facts}; {SURE}, by more than {low:.3f}, and only {limit:g} is allowed."
    return f"{facts}, where {limit:g} is allowed, but so little text cannot tell: {_about(needed)} windows would."


def judge_throughput(batch_name: str, batch: ThroughputBatch, minimum: float, is_same_model: bool) -> Gate:
    """Ratio of speeds: pass if the interval starts at or above the minimum, fail if it ends below it.

    A model measured against itself cannot fail: whatever the ratio says is noise of the measurement.
    """
    ratio, n = batch["ratio"], len(batch["baseline_tok_per_s"])
    low, high = ratio["interval"]
    enough = ratio["confidence"] >= CONFIDENCE
    verdict: Outcome = "inconclusive"
    if enough and low >= minimum:
        verdict = "pass"
    elif enough and high < minimum and not is_same_model:
        verdict = "fail"
    needed = None
    if verdict == "inconclusive":
        half_width = max(ratio["value"] - low, high - ratio["value"])
        needed = means_needed(ratio["value"], half_width, n, minimum) if enough else pairs_needed(CONFIDENCE)
    baseline, candidate = median(batch["baseline_tok_per_s"]), median(batch["candidate_tok_per_s"])
    return {
        "name": f"throughput.{batch_name}",
        "suite": "throughput",
        "metric": batch_name,
        "kind": "ratio",
        "baseline": baseline,
        "candidate": candidate,
        "difference": candidate - baseline,
        "value": ratio["value"],
        "interval": [low, high],
        "confidence": ratio["confidence"],
        "test": ratio["method"],
        "p_value": None,
        "p_holm": None,
        "limit": minimum,
        "unit": "tok_per_s",
        "direction": "higher_is_better",
        "n": n,
        "discordant": None,
        "verdict": verdict,
        "reason": _explain_throughput(batch, minimum, verdict, is_same_model, needed),
        "items_needed": needed,
    }


def _explain_throughput(
    batch: ThroughputBatch, minimum: float, verdict: Outcome, is_same_model: bool, needed: int | None
) -> str:
    size, ratio = batch["batch_size"], batch["ratio"]
    low, high = ratio["interval"]
    requests = "one request" if size == 1 else f"{size} requests at once"
    facts = f"With {requests} the candidate writes {ratio['value']:.2f} times as fast as the original"
    if verdict == "pass":
        return f"{facts}; {SURE}, at least {low:.2f} times, and {minimum:g} is asked for."
    if verdict == "fail":
        return f"{facts}; {SURE}, at most {high:.2f} times, and {minimum:g} is asked for."
    if is_same_model:
        return f"{facts}, but both are the same model, so this is noise of the measurement and fails nothing."
    return (
        f"{facts} (between {low:.2f} and {high:.2f}), where {minimum:g} is asked for, but so few runs "
        f"cannot tell: {_about(needed)} pairs would."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _about(needed: int | None) -> str:
    """A number of items in round words: two digits of it, upwards."""
    if needed is None:
        return "many more"
    step = 10 ** max(0, len(str(needed)) - 2)
    return f"about {math.ceil(needed / step) * step:,}"
