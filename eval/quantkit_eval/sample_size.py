"""How many items a comparison needs before it can decide.

All sizes rest on the share of discordant pairs p_d and the true drop d, both as fractions; the difference of a pair is
-1, 0 or 1 with mean -d and variance p_d - d**2.
"""

import math

from scipy.stats import norm

from quantkit_eval.statistics import ALPHA, mcnemar_p

POWER = 0.80
TOO_MANY = 1_000_000  # a measured mean so near to its limit that no number is worth giving


def items_for_mcnemar(discordance: float, drop: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """Items with which the one-sided McNemar test finds a true drop.

        n = (z_alpha sqrt(p_d) + z_power sqrt(p_d - d**2))**2 / d**2

    Args:
        discordance: share of discordant pairs, at least the drop.
        drop: true drop, above 0.
        alpha: one-sided error.
        power: probability of finding it.

    Raises:
        ValueError: the drop is not in (0, discordance].

    Source: Connor, Biometrics 43 (1987) 207-211.
    """
    if not 0 < drop <= discordance <= 1:
        raise ValueError(f"drop={drop} must lie in (0, discordance={discordance}]")
    z_alpha, z_power = float(norm.ppf(1 - alpha)), float(norm.ppf(power))
    spread = z_alpha * math.sqrt(discordance) + z_power * math.sqrt(discordance - drop**2)
    return math.ceil(spread**2 / drop**2)


def items_for_non_inferiority(
    discordance: float, margin: float, drop: float = 0.0, alpha: float = ALPHA, power: float = POWER
) -> int:
    """Items with which a true drop below the margin is shown to be below it.

        n = (z_alpha + z_power)**2 (p_d - d**2) / (margin - d)**2

    Args:
        discordance: share of discordant pairs.
        margin: largest tolerable drop.
        drop: true drop, below the margin; negative if the candidate is better.
        alpha: one-sided error.
        power: probability of showing it.

    Raises:
        ValueError: the drop is not below the margin, or larger than the discordance.

    Source: Liu et al., Statistics in Medicine 21 (2002) 231-245, the large-sample form.
    """
    if not drop < margin or not abs(drop) <= discordance <= 1:
        raise ValueError(f"drop={drop} must lie below margin={margin} and within discordance={discordance}")
    spread = float(norm.ppf(1 - alpha)) + float(norm.ppf(power))
    return math.ceil(spread**2 * (discordance - drop**2) / (margin - drop) ** 2)


def items_needed(
    improved: int, regressed: int, n: int, margin: float, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Items with which an inconclusive comparison would probably decide, if what it saw so far is the truth.

    The smaller of the two sizes above that apply: a drop below the margin can be shown to be below it, a drop above 0
    can be shown to be one. Where nothing flipped yet, one discordant pair is assumed. Always more than n.

    Returns:
        The number of items, or None where no number can be given (nothing was evaluated).
    """
    if n == 0:
        return None
    drop = (regressed - improved) / n
    discordance = max((regressed + improved) / n, 1 / n, abs(drop))
    sizes = []
    if drop < margin:
        least = _next_integer(float(norm.ppf(1 - alpha)) ** 2 * (1 - margin) / margin)  # even if nothing ever flips
        sizes.append(max(least, items_for_non_inferiority(discordance, margin, drop, alpha, power)))
    if drop > 0:
        least = math.ceil(fewest_regressions(alpha) / drop)
        sizes.append(max(least, items_for_mcnemar(discordance, drop, alpha, power)))
    return max(min(sizes), n + 1)


def fewest_regressions(alpha: float = ALPHA) -> int:
    """Regressions without any improvement that McNemar's test needs to reject: 5 at 5 %, whatever n is."""
    regressed = 1
    while mcnemar_p(0, regressed) >= alpha:
        regressed += 1
    return regressed


def means_needed(
    mean: float, half_width: float, n: int, limit: float, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Clusters with which a mean would probably be told from a limit: the interval has to shrink to the gap.

    Args:
        mean: as measured on n clusters.
        half_width: of the interval with one-sided error alpha, on the side of the limit.
        n: clusters so far.
        limit: what the mean is compared with.
        alpha: one-sided error of the interval.
        power: probability of telling.

    Returns:
        The number of clusters, or None where the mean is too near to the limit for any.
    """
    if limit == mean or not math.isfinite(half_width):
        return None
    z_alpha, z_power = float(norm.ppf(1 - alpha)), float(norm.ppf(power))
    needed = n * (half_width / abs(limit - mean) * (z_alpha + z_power) / z_alpha) ** 2
    return max(n + 1, math.ceil(needed)) if needed < TOO_MANY else None


def _next_integer(value: float) -> int:
    """Smallest integer that is strictly larger."""
    return math.floor(value) + 1


def pairs_needed(confidence: float) -> int:
    """Fewest pairs of runs whose whole range is an interval of that confidence for their median: 5 for 90 %."""
    pairs = 2
    while 1 - 2 * 0.5**pairs < confidence:
        pairs += 1
    return pairs
