"""How sure a number is, and whether a difference is more than chance.

Items are paired: the same prompt went to both models, so an item is concordant, improved (only the candidate is right)
or regressed (only the baseline is right), and only the discordant ones say something about the difference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest, norm

ALPHA = 0.05  # one-sided error of each bound that decides a gate
NUM_RESAMPLES = 5_000
MIN_CLUSTERS = 8  # fewer tell nothing of the spread between them: simulated errors of a bound reach ten times nominal


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval.

    Attributes:
        value: the point estimate.
        interval: (low, high).
        confidence: two-sided; each end alone errs with half of the rest.
        n: independent units that the interval counts.
    """

    value: float
    interval: tuple[float, float]
    confidence: float
    n: int

    def cut_to(self, low: float, high: float) -> tuple[float, float] | None:
        """The interval within the range that a value can have; None if there is none, or it has no width.

        Equal clusters are no proof that the next one is equal too, so a point is not shown as an interval.
        """
        start, stop = self.interval
        if not (math.isfinite(start) and math.isfinite(stop) and start < stop):
            return None
        return min(max(start, low), self.value), max(min(stop, high), self.value)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion.

    Args:
        successes: 0 to n.
        n: trials; (0, 1) comes back for none.
        confidence: two-sided.

    Raises:
        ValueError: successes is not in [0, n].

    Source: Wilson, JASA 22 (1927) 209-212; method 3 of Newcombe, Statistics in Medicine 17 (1998) 857-872.
    """
    _check_counts(successes, 0, n)
    if n == 0:
        return 0.0, 1.0
    z = float(norm.ppf((1 + confidence) / 2))
    share = successes / n
    centre = share + z * z / (2 * n)
    half_width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half_width) / scale
    high = 1.0 if successes == n else (centre + half_width) / scale
    return low, high


def mcnemar_p(improved: int, regressed: int) -> float:
    """One-sided exact McNemar test: how probable are this many regressions or more if the models are equally good?

    Given the discordant pairs, regressions are Binomial(improved + regressed, 1/2). No discordant pair gives 1.

    Source: McNemar, Psychometrika 12 (1947) 153-157, in its exact conditional form.
    """
    _check_counts(improved, regressed, improved + regressed)
    if improved + regressed == 0:
        return 1.0
    return float(binomtest(regressed, improved + regressed, 0.5, alternative="greater").pvalue)


def tango_interval(improved: int, regressed: int, n: int, confidence: float = 1 - 2 * ALPHA) -> tuple[float, float]:
    """Score interval of the paired difference (improved - regressed) / n, that is candidate less baseline.

    The set of differences d with |improved - regressed - n d| <= z sqrt(n (2 q + d (1 - d))), where q is the maximum
    likelihood estimate of the probability of a regression given d. Chosen over Newcombe's square-and-add interval
    because its one-sided error at the margin stays nearer to nominal when nearly all discordant pairs are regressions
    (the simulations are in the tests), and because it needs the discordant counts only.

    Args:
        improved: items that only the candidate got right.
        regressed: items that only the baseline got right.
        n: all items; (-1, 1) comes back for none.
        confidence: two-sided; 0.90 leaves 5 % outside each end.

    Raises:
        ValueError: the counts are negative or exceed n.

    Source: Tango, Statistics in Medicine 17 (1998) 891-908.
    """
    _check_counts(improved, regressed, n)
    if n == 0:
        return -1.0, 1.0
    z = float(norm.ppf((1 + confidence) / 2))
    return _tango_lower(improved, regressed, n, z), -_tango_lower(regressed, improved, n, z)


def _tango_lower(improved: int, regressed: int, n: int, z: float) -> float:
    """Smallest difference that the score test does not reject: bisection, to rounding."""
    low, high = -1.0, (improved - regressed) / n
    while high - low > 1e-12:
        middle = (low + high) / 2
        a = -(improved + regressed) + (2 * n - improved + regressed) * middle
        q = (math.sqrt(max(a * a + 8 * n * regressed * middle * (1 - middle), 0.0)) - a) / (4 * n)
        variance = n * (2 * q + middle * (1 - middle))
        if improved - regressed - n * middle > z * math.sqrt(max(variance, 0.0)):
            low = middle
        else:
            high = middle
    return high


def is_non_inferior(improved: int, regressed: int, n: int, margin: float, alpha: float = ALPHA) -> bool:
    """Whether the drop is shown to be smaller than the margin: the upper bound of the drop lies below it.

    Args:
        improved: items that only the candidate got right.
        regressed: items that only the baseline got right.
        n: all items.
        margin: largest tolerable drop, a fraction above 0.
        alpha: one-sided error.
    """
    return -tango_interval(improved, regressed, n, 1 - 2 * alpha)[0] < margin


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given; comparing each with alpha keeps the family-wise error at alpha.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def bootstrap_mean(
    values: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    confidence: float = 1 - 2 * ALPHA,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Mean over clusters with the studentized bootstrap interval (bootstrap-t).

    Clusters (windows of text) are resampled whole, because tokens within one are not independent. Studentizing keeps
    the ends near their nominal error with few or skewed clusters, where plain percentiles are too narrow. Resamples of
    few clusters lack the tail that the text has, so the ends are moved out by sqrt((n + 1) / (n - 1)), n being the
    effective number of clusters; the simulations in the tests say what the errors are with it.

    Args:
        values: [n] mean of each cluster.
        weights: [n] size of each cluster, above 0; all alike if None.
        confidence: two-sided.
        num_resamples: bootstrap draws.
        seed: of the draws; the same input gives the same interval.

    Returns:
        The weighted mean. The interval of fewer than ``MIN_CLUSTERS`` effective clusters is infinite, of equal
        clusters a point. Where but one or two clusters differ from all others, the end on their side is infinite: too
        many draws hold none of them and so have no spread to tell how rare they are.

    Raises:
        ValueError: no values, not finite, or weights that do not fit.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 12.5; the standard error of the
    weighted mean is the linearised one of a ratio estimator.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    if x.ndim != 1 or x.size == 0 or w.shape != x.shape or not np.isfinite(x).all() or not (w > 0).all():
        raise ValueError(f"values {x.shape} and weights {w.shape} must be non-empty vectors of one length, finite, > 0")
    mean = float(np.average(x, weights=w))
    effective = effective_clusters(w)
    if effective < MIN_CLUSTERS - 1e-9:
        return Estimate(mean, (-math.inf, math.inf), confidence, int(x.size))
    if np.ptp(x) == 0:
        return Estimate(mean, (mean, mean), confidence, int(x.size))
    counts = np.random.default_rng(seed).multinomial(x.size, np.full(x.size, 1 / x.size), size=num_resamples)
    scale = float(np.abs(x - mean).max()) or float(np.ptp(x))
    x = (x - mean) / scale  # so that no square is too small or too large for a float
    centre = float(np.average(x, weights=w))  # 0, but for the rounding of the mean
    means, errors = _mean_and_error(x, w, counts.astype(np.float64))
    _, error = _mean_and_error(x, w, np.ones((1, x.size)))
    distance = means - centre
    t = np.where(np.abs(distance) > 1e-9, np.copysign(math.inf, distance), 0.0)  # of a draw of equal clusters
    np.divide(distance, errors, out=t, where=errors > 1e-9 * error[0])
    tail = (1 - confidence) / 2
    low_t, high_t = np.quantile(t, tail, method="lower"), np.quantile(t, 1 - tail, method="higher")
    unit = scale * float(error[0]) * math.sqrt((effective + 1) / (effective - 1))
    return Estimate(mean, (mean - float(high_t) * unit, mean - float(low_t) * unit), confidence, int(x.size))


def effective_clusters(weights: ArrayLike) -> float:
    """As many equal clusters as these are worth: one long text beside short ones counts as little more than one.

    Source: Kish, Survey Sampling (1965), section 11.7.
    """
    w = np.asarray(weights, dtype=np.float64)
    return float(w.sum() ** 2 / (w * w).sum()) if w.size else 0.0


def _mean_and_error(
    x: NDArray[np.float64], w: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weighted mean and its standard error for each row of counts [R, n]."""
    total = counts @ w
    means = counts @ (w * x) / total
    deviations = x - means[:, None]  # not multiplied out: where clusters are nearly equal, rounding would be the spread
    deviations *= w
    deviations *= deviations
    return means, np.sqrt(np.einsum("rn,rn->r", counts, deviations)) / total


def bootstrap_perplexity(
    nll_nats: ArrayLike, *, weights: ArrayLike | None = None, confidence: float = 1 - 2 * ALPHA, seed: int = 0
) -> Estimate:
    """Perplexity from the NLL of windows; from paired differences of NLL, the ratio of two perplexities.

    Both are the exponential of a mean, and so are the ends of the interval.

    Args:
        nll_nats: [n] nats a token, one a window; or candidate less baseline.
        weights: [n] tokens of each window.
        confidence: two-sided.
        seed: of the bootstrap.

    Returns:
        Infinite where a float holds no such number: a damaged model gives right tokens thousands of nats.
    """
    mean = bootstrap_mean(nll_nats, weights=weights, confidence=confidence, seed=seed)
    value, low, high = map(_exp, (mean.value, *mean.interval))
    return Estimate(value, (low, high), confidence, mean.n)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # e**700 nearly fills a float


def median_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float = 1 - 2 * ALPHA) -> Estimate:
    """Median of candidate / baseline over pairs that were measured in turns, with an interval that assumes no shape.

    The interval runs between two order statistics of the ratios; how often it misses the true median is a binomial
    probability. Fewer than 5 pairs cannot reach 90 %: then the whole range comes back with the confidence that it has.

    Args:
        baseline: rates, above 0.
        candidate: rates of the same turns.
        confidence: two-sided, wanted.

    Returns:
        ``confidence`` is the attained one.

    Raises:
        ValueError: no pairs, unequal lengths or a rate that is not above 0.

    Source: David and Nagaraja, Order Statistics (3rd ed. 2003), section 7.1.
    """
    if not baseline or len(baseline) != len(candidate) or min(*baseline, *candidate) <= 0:
        raise ValueError(f"{len(baseline)} and {len(candidate)} rates: need as many of each, at least one, all above 0")
    ratios = np.sort(np.asarray(candidate, dtype=np.float64) / np.asarray(baseline, dtype=np.float64))
    n = int(ratios.size)
    cut = 0  # the interval drops this many ratios at each end
    while 2 * (cut + 1) < n and 1 - 2 * _binomial_half_cdf(cut + 1, n) >= confidence:
        cut += 1
    attained = max(0.0, 1 - 2 * _binomial_half_cdf(cut, n))
    return Estimate(float(np.median(ratios)), (float(ratios[cut]), float(ratios[n - 1 - cut])), attained, n)


def _binomial_half_cdf(k: int, n: int) -> float:
    """P(at most k of n) when each is even."""
    return sum(math.comb(n, i) for i in range(k + 1)) / 2**n


def _check_counts(first: int, second: int, n: int) -> None:
    if min(first, second) < 0 or first + second > n:
        raise ValueError(f"counts {first} and {second} do not fit into n={n}")
