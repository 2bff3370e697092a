"""Why a gate ended as it did: a sentence for somebody who has never heard of the test behind it."""

import math
from dataclasses import dataclass

from quantkit_eval.record_types import Outcome, ThroughputBatch
from quantkit_eval.statistics import ALPHA, MIN_CLUSTERS, Estimate, mcnemar_p

METRIC_WORDS = {"exact": "exactly right", "schema_ok": "valid for their schema", "followed": "as they were told"}


def sure(alpha: float) -> str:
    """``with 95 % confidence``."""
    return f"with {100 * (1 - alpha):.3g} % confidence"


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


def explain_drop(
    suite: str,
    metric: str,
    counts: PairedCounts,
    largest: float,
    margin: float,
    verdict: Outcome,
    needed: int | None,
    alpha: float = ALPHA,
) -> str:
    """Of a gate on right answers. A loss that is proven is not yet one that is proven to be too large.

    Args:
        suite: its name.
        metric: its right-or-wrong metric.
        counts: of its items.
        largest: upper bound of the drop, a fraction.
        margin: largest tolerable drop.
        verdict: of the gate.
        needed: items that would probably decide.
        alpha: one-sided error of the bound.
    """
    if counts.n == 0:
        return f"No item of {suite} was evaluated, so nothing can be said about it."
    facts = _facts(suite, metric, counts)
    drop, limit = told_apart(max(0.0, 100 * largest), 100 * margin, 1), f"{100 * margin:g}"
    if verdict == "pass":
        return f"{facts}; {sure(alpha)}, the loss is at most {drop} percentage points, and {limit} are allowed."
    beyond = f"may be as large as {drop} percentage points, where {limit} are allowed"
    if verdict == "fail":
        flips = f"{counts.regressed} got worse and {counts.improved} better, too one-sided to be chance"
        measured = 100 * (counts.regressed - counts.improved) / counts.n
        if measured > 100 * margin:
            loss = told_apart(measured, 100 * margin, 1)
            return f"{facts}; {flips}, and a loss of {loss} percentage points is more than the {limit} allowed."
        return f"{facts}; {flips}: a loss is proven, not that it is too large, but it {beyond}."
    return f"{facts}; the loss {beyond}, but so few items cannot tell loss from chance: {_about(needed)} items would."


def explain_empty(suite: str, metric: str, counts: PairedCounts, margin: float) -> str:
    """Of a gate whose baseline has no more to lose than is allowed."""
    return (
        f"{_facts(suite, metric, counts)}; losing all of them would stay within the {100 * margin:g} percentage points "
        "that are allowed, so nothing is shown: a suite that the original can do would, or a smaller margin."
    )


def _facts(suite: str, metric: str, counts: PairedCounts) -> str:
    words = METRIC_WORDS.get(metric, metric)
    before, after = (counts.both + counts.regressed) / counts.n, (counts.both + counts.improved) / counts.n
    return f"Of {counts.n} {suite} answers, {_percent(before)} were {words} before and {_percent(after)} after"


def explain_kl(estimate: Estimate, limit: float, verdict: Outcome, needed: int | None, alpha: float = ALPHA) -> str:
    """Of a gate on the mean divergence, nats."""
    low, high = estimate.interval
    value = told_apart(estimate.value, limit, 3)
    facts = f"The predictions differ from the original's by {value} nats a token on average"
    if verdict == "pass":
        return f"{facts}; {sure(alpha)}, by no more than {told_apart(high, limit, 3)}, and {limit:g} is allowed."
    if verdict == "fail":
        return f"{facts}; {sure(alpha)}, by more than {told_apart(low, limit, 3)}, and only {limit:g} is allowed."
    if not math.isfinite(high) and needed is None:
        return f"{facts}, where {limit:g} is allowed, but so few windows differ from the others that nothing is shown."
    if not math.isfinite(high):
        more = f"{MIN_CLUSTERS} or more would"
        if needed is not None and needed > MIN_CLUSTERS:
            more = f"{needed} or more like these would ({MIN_CLUSTERS} if all were of equal length)"
        return f"{facts}, where {limit:g} is allowed, but so few windows give no interval: {more}."
    return f"{facts}, where {limit:g} is allowed, but so little text cannot tell: {_about(needed)} windows would."


def explain_throughput(
    batch: ThroughputBatch, minimum: float, verdict: Outcome, is_same_model: bool, needed: int | None
) -> str:
    """Of a gate on the ratio of speeds."""
    size, ratio = batch["batch_size"], batch["ratio"]
    low, high = (told_apart(end, minimum, 2) for end in ratio["interval"] or (math.nan, math.nan))
    requests = "one request" if size == 1 else f"{size} requests at once"
    facts = f"With {requests} the candidate writes {told_apart(ratio['value'], minimum, 2)} times as fast as before"
    facts += " (median of the paired rounds)"
    if verdict == "pass":
        return f"{facts}; {sure(ALPHA)}, at least {low} times, and {minimum:g} is asked for."
    if verdict == "fail":
        return f"{facts}; {sure(ALPHA)}, at most {high} times, and {minimum:g} is asked for."
    if is_same_model:
        return f"{facts}, but both are the same model, so this is noise of the measurement and fails nothing."
    between = f" (between {low} and {high})" if ratio["interval"] else ""
    return (
        f"{facts}{between}, where {minimum:g} is asked for, but so few runs cannot tell: {_about(needed)} pairs would."
    )


def told_apart(value: float, limit: float, decimals: int) -> str:
    """A number with so many decimals, or more if it would be rounded onto or over a limit that it is not at."""
    for digits in range(decimals, decimals + 7):
        text = f"{value:.{digits}f}"
        if value == limit or (float(text) - limit) * (value - limit) > 0:
            return text
    return f"{value:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _about(needed: int | None) -> str:
    """A number of items in round words: two digits of it, upwards."""
    if needed is None:
        return "many more"
    step = 10 ** max(0, len(str(needed)) - 2)
    return f"about {math.ceil(needed / step) * step:,}"
