"""From how many requests at once a candidate is no longer faster than its baseline."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from quantkit_eval.record_types import Crossover, LoadPoint


def find_crossovers(points: Sequence[LoadPoint], num_models: int) -> list[Crossover]:
    """For each candidate and each length of prompts, where its rate falls below the baseline's as batches grow.

    ``estimate`` is between two measured batches, on a straight line of the ratio over the logarithm of the batch: the
    first place where it falls through 1. ``proven`` is the smallest batch whose whole interval lies below 1.
    ``fastest`` names the model with the highest median rate at the largest batch, 0 being the baseline.

    Args:
        points: of a load, both loops; the open one says nothing here.
        num_models: baseline and candidates.
    """
    found: list[Crossover] = []
    for context in sorted({point["context"] for point in points}):
        line = sorted(
            (point for point in points if point["loop"] == "closed" and point["context"] == context),
            key=lambda point: point["batch"] or 0,
        )
        if not line:
            continue
        rates = [median(runs["tok_per_s"]) for runs in line[-1]["runs"]]
        for candidate in range(1, num_models):
            ratios = [(int(point["batch"] or 0), point["ratios"][candidate - 1]) for point in line]
            proven = [batch for batch, ratio in ratios if ratio["interval"] and ratio["interval"][1] < 1]
            found.append(
                {
                    "candidate": candidate,
                    "context": context,
                    "estimate": _falls_through_one([(batch, ratio["value"]) for batch, ratio in ratios]),
                    "proven": min(proven) if proven else None,
                    "fastest": max(range(num_models), key=rates.__getitem__),
                }
            )
    return found


def _falls_through_one(ratios: Sequence[tuple[int, float]]) -> float | None:
    """The batch at which the ratio first reaches 1 from above; the smallest one if it begins below; None if never."""
    if ratios[0][1] < 1:
        return float(ratios[0][0])
    for (batch, ratio), (next_batch, next_ratio) in pairwise(ratios):
        if ratio >= 1 > next_ratio:
            share = (ratio - 1) / (ratio - next_ratio)
            return math.exp(math.log(batch) + share * math.log(next_batch / batch))
    return None
