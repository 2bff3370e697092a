"""Stopping a comparison early because its candidate is hopeless, without a price for having looked after every item."""

from collections.abc import Iterable, Sequence

import numpy as np

BETS = (0.1, 0.2, 0.4, 0.6, 0.8)  # shares of the largest bet that cannot lose more than it has


def drop_evidence(drops: Iterable[int], margin: float) -> float:
    """Evidence that the mean drop is above the margin: the most that a gambler who bets on it ever had.

    Each item is a drop of 1 (only the baseline is right), -1 (only the candidate is right) or 0. The gambler begins
    with 1, spread over several constant bets; a bet b turns a stake into stake * (1 + b (drop - margin)). If no item's
    expected drop, given those before it, is above the margin, the wealth is a supermartingale that stays above zero, so
    whatever the number of items and looks

        P(wealth ever reaches 1 / alpha) <= alpha     (Ville's inequality)

    It needs items in an order that does not depend on the answers; an e-value of Wald's sequential probability ratio
    kind, with several alternatives at once.

    Args:
        drops: of the items, in the order in which they were asked.
        margin: largest tolerable drop, 0 to 1.

    Returns:
        The largest wealth; 1 without items.

    Raises:
        ValueError: the margin is not in [0, 1), or a drop is not -1, 0 or 1.

    Source: Waudby-Smith and Ramdas, JRSS B 86 (2024) 1-27, section 4 (arXiv:2010.09686); Ville, Etude critique de la
    notion de collectif (1939); Wald, Annals of Mathematical Statistics 16 (1945) 117-186.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} must lie in [0, 1)")
    seen = np.asarray(list(drops), dtype=np.float64)
    if not np.isin(seen, (-1, 0, 1)).all():
        raise ValueError("a drop is -1, 0 or 1")
    bets = np.asarray(BETS) / (1 + margin)
    wealth = np.exp(np.cumsum(np.log1p(bets[:, None] * (seen - margin)), axis=1)).mean(axis=0)
    return max(1.0, float(wealth.max(initial=1.0)))


def is_hopeless(drops: Sequence[int], margin: float, alpha: float) -> bool:
    """Whether a drop above the margin is shown; wrong with a probability of at most alpha, however often it is asked.

    Args:
        drops: as for :func:`drop_evidence`.
        margin: largest tolerable drop.
        alpha: error.
    """
    return drop_evidence(drops, margin) >= 1 / alpha
