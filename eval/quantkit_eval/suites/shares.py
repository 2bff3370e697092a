"""The metrics of a suite's items as numbers with an interval: shares, accuracies of parts, means."""

import math
from collections.abc import Mapping, Sequence

from quantkit_eval.record_types import Metric, MetricValue
from quantkit_eval.statistics import bootstrap_mean, wilson_interval

CONFIDENCE = 0.95

Items = Sequence[Mapping[str, MetricValue]]


def share_of(name: str, items: Items, *, lower_is_better: bool = False) -> Metric:
    """Share of items for which a predicate holds, of those that have it."""
    values = [bool(item[name]) for item in items if item.get(name) is not None]
    hits, n = sum(values), len(values)
    return {
        "value": hits / n if n else None,
        "n": n,
        "interval": list(wilson_interval(hits, n, CONFIDENCE)) if n else None,
        "confidence": CONFIDENCE if n else None,
        "method": "Wilson score interval",
        "unit": "fraction",
        "direction": "lower_is_better" if lower_is_better else "higher_is_better",
    }


def part_accuracy(correct: str, total: str, items: Items) -> Metric:
    """Share of right parts; the parts of one item are not independent, so items are what the bootstrap draws."""
    counted = [(float(item[correct] or 0), float(item[total] or 0)) for item in items if item.get(total)]
    return _mean([part / whole for part, whole in counted], [whole for _, whole in counted], highest=1.0)


def mean_of(name: str, items: Items) -> Metric:
    """Mean of a number of characters that had better be small."""
    metric = _mean([float(item[name] or 0) for item in items])
    metric["unit"], metric["direction"] = "characters", "lower_is_better"
    return metric


def mean_share(name: str, items: Items) -> Metric:
    """Mean of a share that items have, of those that have it."""
    return _mean([float(item[name] or 0) for item in items if item.get(name) is not None], highest=1.0)


def _mean(values: Sequence[float], weights: Sequence[float] | None = None, highest: float = math.inf) -> Metric:
    estimate = bootstrap_mean(values, weights=weights, confidence=CONFIDENCE) if values else None
    interval = estimate.cut_to(0.0, highest) if estimate else None
    return {
        "value": estimate.value if estimate else None,
        "n": len(values),
        "interval": list(interval) if interval else None,
        "confidence": CONFIDENCE if interval else None,
        "method": "studentized bootstrap over items",
        "unit": "fraction",
        "direction": "higher_is_better",
    }
