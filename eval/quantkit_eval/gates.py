"""What must hold: the gates of a recipe, and how one number is judged.

Every judgement has three outcomes, and a small evaluation cannot pass by accident: without enough evidence the outcome
is inconclusive, with the number of items that would probably decide. ``reasons`` puts each into a sentence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from quantkit_eval.errors import OptionError
from quantkit_eval.reasons import PairedCounts, explain_drop, explain_empty, explain_kl, explain_throughput
from quantkit_eval.record_types import Gate, Outcome, ThroughputBatch
from quantkit_eval.sample_size import items_needed, means_needed, pairs_needed
from quantkit_eval.statistics import (
    ALPHA,
    MIN_CLUSTERS,
    bootstrap_mean,
    effective_clusters,
    is_non_inferior,
    tango_interval,
)

CONFIDENCE = 1 - 2 * ALPHA  # of the two-sided interval; each end alone errs with ALPHA


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
            OptionError: an unknown key, or a limit that is no number above 0.
        """
        known = [item.name for item in fields(cls)]
        for key in gates:
            if key not in known:
                raise OptionError(f"unknown gate {key!r}", fix=f"Choose from {', '.join(known)}")
        drops = dict(gates.get("max_drop_pp") or {})
        for suite, limit in drops.items():
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


def judge_drop(
    suite: str, metric: str, counts: PairedCounts, max_drop_pp: float, p_holm: float, alpha: float = ALPHA
) -> Gate:
    """Non-inferiority of the share of right answers.

    Pass if the upper bound of the drop is below the limit; fail if it is not and McNemar's test, corrected for the
    number of such gates, says that the drop is no accident; else inconclusive. A baseline that gets no more right than
    may be lost shows nothing, whatever the candidate loses: then only one that is proven better passes.
    """
    n, margin = counts.n, max_drop_pp / 100
    low, high = tango_interval(counts.improved, counts.regressed, n, 1 - 2 * alpha)
    baseline = (counts.both + counts.regressed) / n if n else None
    candidate = (counts.both + counts.improved) / n if n else None
    difference = (counts.improved - counts.regressed) / n if n else None
    passes = is_non_inferior(counts.improved, counts.regressed, n, margin, alpha)
    is_empty = baseline is not None and baseline <= margin and low <= 0  # more items would change nothing
    verdict: Outcome = (
        "inconclusive" if is_empty else "pass" if passes else "fail" if p_holm < alpha else "inconclusive"
    )
    needed = None
    if verdict == "inconclusive" and not is_empty:
        needed = items_needed(counts.improved, counts.regressed, n, margin, alpha)
    reason = explain_drop(suite, metric, counts, -low, margin, verdict, needed, alpha)
    if is_empty:
        reason = explain_empty(suite, metric, counts, margin)
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
        "confidence": 1 - 2 * alpha if n else None,
        "test": "one-sided exact McNemar test, Holm-corrected; Tango score interval",
        "p_value": counts.p_value,
        "p_holm": p_holm,
        "limit": margin,
        "unit": "fraction",
        "direction": "higher_is_better",
        "n": n,
        "discordant": {"improved": counts.improved, "regressed": counts.regressed},
        "verdict": verdict,
        "reason": reason,
        "items_needed": needed,
    }


def judge_kl(
    window_means: Sequence[float], window_tokens: Sequence[int], max_kl_mean_nats: float, alpha: float = ALPHA
) -> Gate:
    """Upper bound on the mean divergence: pass if the interval ends below the limit, fail if it starts above it.

    With fewer effective windows than ``MIN_CLUSTERS``, or if hardly any differs from the others, there is no interval.
    """
    estimate = bootstrap_mean(window_means, weights=window_tokens, confidence=1 - 2 * alpha)
    (low, high), limit = estimate.interval, max_kl_mean_nats
    verdict: Outcome = "pass" if high <= limit else "fail" if low > limit else "inconclusive"
    known = math.isfinite(high)
    needed = None
    if verdict == "inconclusive":
        half_width = high - estimate.value if estimate.value <= limit else estimate.value - low
        fewest = math.ceil(MIN_CLUSTERS * estimate.n / effective_clusters(window_tokens) - 1e-9)
        needed = means_needed(estimate.value, half_width, estimate.n, limit, alpha) if known else fewest
        if needed is not None and needed <= estimate.n:
            needed = None  # enough windows, but nearly all of them equal: how many would do nobody can tell
    return {
        "name": "nll.kl_mean_nats",
        "suite": "nll",
        "metric": "kl_mean_nats",
        "kind": "upper_bound",
        "baseline": None,
        "candidate": estimate.value,
        "difference": None,
        "value": estimate.value,
        "interval": [max(0.0, low), high] if known else None,
        "confidence": 1 - 2 * alpha if known else None,
        "test": "studentized bootstrap interval over windows",
        "p_value": None,
        "p_holm": None,
        "limit": limit,
        "unit": "nats_per_token",
        "direction": "lower_is_better",
        "n": estimate.n,
        "discordant": None,
        "verdict": verdict,
        "reason": explain_kl(estimate, limit, verdict, needed, alpha),
        "items_needed": needed,
    }


def judge_throughput(batch_name: str, batch: ThroughputBatch, minimum: float, is_same_model: bool) -> Gate:
    """Ratio of speeds: pass if the interval starts at or above the minimum, fail if it ends below it.

    A model measured against itself cannot fail: whatever the ratio says is noise of the measurement.
    """
    ratio, n = batch["ratio"], len(batch["baseline_tok_per_s"])
    low, high = ratio["interval"] or (0.0, math.inf)
    enough = (ratio["confidence"] or 0.0) >= CONFIDENCE
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
        "interval": ratio["interval"],
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
        "reason": explain_throughput(batch, minimum, verdict, is_same_model, needed),
        "items_needed": needed,
    }
