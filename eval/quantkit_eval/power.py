"""What a comparison can find, before it is run: the drop that each suite detects, and the items that a margin needs.

Both depend on how many items will flip at all, which only a run can tell: ``discordance``, the share of items that one
of the two models gets right and the other does not. The probabilities are exact sums over its binomial distribution,
not approximations, because the tests that decide are exact or nearly so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

from quantkit_eval.sample_size import POWER, items_for_non_inferiority
from quantkit_eval.statistics import ALPHA
from quantkit_eval.suites.item_counts import count_items

LIKELY = 1e-9  # numbers of discordant pairs that are less probable than this, on each side, are left out
TOO_MANY = 200_000
STEPS = 12  # of the bisection for a drop: to a hundredth of a percentage point and better

Counts = NDArray[np.int64]
Chances = NDArray[np.float64]


def mcnemar_power(n: int, discordance: float, drop: float, alpha: float = ALPHA) -> float:
    """Probability that the one-sided exact McNemar test finds a true drop.

    Args:
        n: items.
        discordance: share of discordant pairs.
        drop: true drop, 0 to discordance.
        alpha: one-sided error.

    Raises:
        ValueError: the drop is not in [0, discordance], or the discordance is not in (0, 1].
    """

    def found(pairs: Counts, share: float) -> Chances:
        return binom.sf(_fewest_rejected(pairs, alpha) - 1, pairs, share)

    return _expected(found, n, discordance, drop)


def non_inferiority_power(n: int, discordance: float, margin: float, drop: float = 0.0, alpha: float = ALPHA) -> float:
    """Probability that a comparison passes: the drop is shown to lie below the margin.

    Args:
        n: items.
        discordance: share of discordant pairs.
        margin: largest tolerable drop.
        drop: true drop, 0 to discordance.
        alpha: one-sided error.

    Raises:
        ValueError: the drop is not in [0, discordance], or the discordance is not in (0, 1].
    """

    def passed(pairs: Counts, share: float) -> Chances:
        return binom.cdf(_most_accepted(pairs, n, margin, alpha), pairs, share)

    return _expected(passed, n, discordance, drop)


def detectable_drop(n: int, discordance: float, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """Smallest true drop that McNemar's test finds with that probability; None if it finds none at that discordance."""
    if n == 0 or mcnemar_power(n, discordance, discordance, alpha) < power:
        return None
    low, high = 0.0, discordance
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if mcnemar_power(n, discordance, middle, alpha) >= power else (middle, high)
    return high


def items_to_pass(discordance: float, margin: float, alpha: float = ALPHA, power: float = POWER) -> int | None:
    """Items with which a candidate that lost nothing passes with that probability; None if more than ``TOO_MANY``.

    The large-sample size first, then more until the exact probability is there (a little too many: steps of 2 %).
    """
    n = items_for_non_inferiority(discordance, margin, 0.0, alpha, power)
    while n <= TOO_MANY and non_inferiority_power(n, discordance, margin, 0.0, alpha) < power:
        n = math.ceil(n * 1.02)
    return n if n <= TOO_MANY else None


def _expected(decided: Callable[[Counts, float], Chances], n: int, discordance: float, drop: float) -> float:
    """Mean over the number of discordant pairs of how probable the decision is, given that number."""
    if not 0 <= drop <= discordance <= 1 or discordance == 0:
        raise ValueError(f"drop={drop} must lie in [0, discordance={discordance}], discordance in (0, 1]")
    low, high = (int(end) for end in binom.interval(1 - 2 * LIKELY, n, discordance))
    pairs = np.arange(low, high + 1)
    share = (1 + drop / discordance) / 2  # of the discordant pairs that are regressions
    return float(np.sum(binom.pmf(pairs, n, discordance) * decided(pairs, share)))


def _fewest_rejected(pairs: Counts, alpha: float) -> Counts:
    """Fewest regressions of so many discordant pairs that McNemar's test rejects; more than all if none does."""
    fewest: Counts = binom.isf(alpha, pairs, 0.5).astype(np.int64) + 1
    return np.minimum(np.where(binom.sf(fewest - 1, pairs, 0.5) < alpha, fewest, fewest + 1), pairs + 1)


def _most_accepted(pairs: Counts, n: int, margin: float, alpha: float) -> Counts:
    """Most regressions of so many discordant pairs that ``is_non_inferior`` accepts; -1 if it accepts none.

    Tango's interval ends below the margin exactly if his score statistic at the margin exceeds z: no search.
    """
    z, d = float(norm.ppf(1 - alpha)), -margin
    most = []
    for count in pairs:
        regressed = np.arange(count + 1)
        improved = count - regressed
        a = -float(count) + (2 * n - improved + regressed) * d
        q = (np.sqrt(np.maximum(a * a + 8 * n * regressed * d * (1 - d), 0.0)) - a) / (4 * n)
        variance = np.maximum(n * (2 * q + d * (1 - d)), 0.0)
        most.append(int(np.sum(improved - regressed - n * d > z * np.sqrt(variance))) - 1)
    return np.array(most)


def power_table(
    suites: Mapping[str, Mapping[str, Any]], max_drop_pp: Mapping[str, float], discordances: Sequence[float]
) -> list[dict[str, Any]]:
    """What each suite of a recipe can find, for several shares of items that may flip.

    A drop counts as found where McNemar's test rejects after Holm's correction in its worst case, alpha divided by the
    number of margins; a single drop among several needs no less.

    Args:
        suites: name -> options, as ``evaluate`` takes them; ``nll`` has no items that flip and is left out.
        max_drop_pp: suite -> margin.
        discordances: shares of items that one of the two models gets right and the other does not.

    Returns:
        A row a suite and share: suite, num_items, discordance, detectable_drop_pp, margin_pp, pass_probability and
        items_to_pass; the last three are None without a margin, drops and items None where there is no answer.

    Raises:
        OptionError: an unknown suite, wrong options, or a file of items that cannot be read.
    """
    alpha = ALPHA / max(1, len(max_drop_pp))
    rows = []
    for suite, options in suites.items():
        n = count_items(suite, options)
        if n is None:
            continue
        for share in discordances:
            drop = detectable_drop(n, share, alpha)
            margin = max_drop_pp[suite] / 100 if suite in max_drop_pp else None
            rows.append(
                {
                    "suite": suite,
                    "num_items": n,
                    "discordance": share,
                    "detectable_drop_pp": None if drop is None else 100 * drop,
                    "margin_pp": max_drop_pp.get(suite),
                    "pass_probability": non_inferiority_power(n, share, margin) if margin and n else None,
                    "items_to_pass": items_to_pass(share, margin) if margin else None,
                }
            )
    return rows
