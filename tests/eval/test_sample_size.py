"""Sizes against tables, and against the power that they promise, by simulation."""

import numpy as np
import pytest

from quantkit_eval.sample_size import (
    fewest_regressions,
    items_for_mcnemar,
    items_for_non_inferiority,
    items_needed,
    means_needed,
    pairs_needed,
)
from quantkit_eval.statistics import is_non_inferior, mcnemar_p, tango_interval

DRAWS = 10_000


@pytest.mark.parametrize(
    ("drop", "sizes"),
    [
        (0.01, {0.02: 1235, 0.05: 3090, 0.10: 6181, 0.20: 12364}),
        (0.02, {0.02: 308, 0.05: 771, 0.10: 1544, 0.20: 3090}),
        (0.05, {0.05: 122, 0.10: 246, 0.20: 493, 0.30: 740}),
        (0.10, {0.10: 60, 0.15: 91, 0.30: 184}),
    ],
)
def test_mcnemar_sizes(drop: float, sizes: dict[float, int]) -> None:
    """A table that was computed elsewhere, rounded to the nearest or up."""
    for discordance, n in sizes.items():
        assert items_for_mcnemar(discordance, drop) == pytest.approx(n, abs=1)


@pytest.mark.parametrize(
    ("discordance", "sizes"),
    [(0.05, (773, 344, 124)), (0.10, (1546, 687, 248)), (0.20, (3092, 1374, 495))],
)
def test_non_inferiority_sizes(discordance: float, sizes: tuple[int, int, int]) -> None:
    found = tuple(items_for_non_inferiority(discordance, margin) for margin in (0.02, 0.03, 0.05))
    assert found == pytest.approx(sizes, abs=1)


def power(n: int, improve: float, regress: float, decision: object) -> float:
    counts = np.random.default_rng(n).multinomial(n, [improve, regress, 1 - improve - regress], size=DRAWS)
    pairs, times = np.unique(counts[:, :2], axis=0, return_counts=True)
    return sum(int(t) for (b, c), t in zip(pairs, times, strict=True) if decision(int(b), int(c))) / DRAWS  # type: ignore[operator]


def test_the_sizes_give_the_power_that_they_promise() -> None:
    n = items_for_non_inferiority(0.10, 0.05)
    assert power(n, 0.05, 0.05, lambda b, c: is_non_inferior(b, c, n, 0.05)) == pytest.approx(0.80, abs=0.04)
    n = items_for_mcnemar(0.10, 0.05)
    found = power(n, 0.025, 0.075, lambda b, c: mcnemar_p(b, c) < 0.05)
    assert found == pytest.approx(0.80, abs=0.06)  # the exact test is a little more careful than the formula


@pytest.mark.parametrize(("discordance", "drop"), [(0.05, 0.06), (0.05, 0.0), (1.2, 0.1)])
def test_mcnemar_sizes_refuse_impossible_drops(discordance: float, drop: float) -> None:
    with pytest.raises(ValueError, match="drop"):
        items_for_mcnemar(discordance, drop)


@pytest.mark.parametrize(("margin", "drop"), [(0.05, 0.05), (0.05, -0.2)])
def test_non_inferiority_sizes_refuse_impossible_drops(margin: float, drop: float) -> None:
    with pytest.raises(ValueError, match="drop"):
        items_for_non_inferiority(0.1, margin, drop)


@pytest.mark.parametrize(("improved", "regressed", "n"), [(0, 0, 20), (3, 5, 100), (0, 4, 32), (2, 2, 60), (0, 3, 64)])
def test_inconclusive_counts_need_more_items_than_there_are(improved: int, regressed: int, n: int) -> None:
    assert not is_non_inferior(improved, regressed, n, 0.05)
    assert mcnemar_p(improved, regressed) >= 0.05
    needed = items_needed(improved, regressed, n, 0.05)
    assert needed is not None
    assert needed > n
    if improved == regressed:  # a drop of 0 seen on: with that many items it passes
        scale = needed / n
        assert is_non_inferior(round(improved * scale), round(regressed * scale), needed, 0.05)
    else:  # or the drop is found
        scale = needed / n
        b, c = round(improved * scale), round(regressed * scale)
        assert is_non_inferior(b, c, needed, 0.05) or mcnemar_p(b, c) < 0.05


def test_even_without_any_flip_a_margin_needs_some_items() -> None:
    needed = items_needed(0, 0, 1, 0.05)
    assert needed is not None
    assert -tango_interval(0, 0, needed)[0] < 0.05
    assert items_needed(0, 0, 0, 0.05) is None


def test_fewest_regressions() -> None:
    assert fewest_regressions(0.05) == 5
    assert fewest_regressions(0.01) == 7


def test_means_and_pairs() -> None:
    assert means_needed(0.09, 0.02, 40, 0.10) == pytest.approx(40 * (2 * 2.4865 / 1.6449) ** 2, rel=0.01)
    assert means_needed(0.10, 0.02, 40, 0.10) is means_needed(0.0, float("inf"), 1, 0.10) is None
    assert means_needed(0.099999, 0.02, 40, 0.10) is None
    assert pairs_needed(0.90) == 5
    assert pairs_needed(0.95) == 6
