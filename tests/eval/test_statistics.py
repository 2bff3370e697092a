"""Against scipy, statsmodels and published examples; and what the error rates really are, by simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from quantkit_eval.statistics import (
    Estimate,
    bootstrap_mean,
    bootstrap_perplexity,
    effective_clusters,
    holm,
    is_non_inferior,
    mcnemar_p,
    median_ratio,
    tango_interval,
    wilson_interval,
)

DRAWS = 10_000
MONTE_CARLO = 3 * math.sqrt(0.05 * 0.95 / DRAWS)  # three standard errors of a rate of 5 %


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_interval_gives_the_published_examples(successes: int, n: int, interval: tuple[float, float]) -> None:
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    assert wilson_interval(successes, n, 0.95) == pytest.approx(interval, abs=5e-5)


@given(st.integers(1, 400), st.data(), st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_interval_equals_statsmodels(n: int, data: st.DataObject, confidence: float) -> None:
    successes = data.draw(st.integers(0, n))
    expected = proportion_confint(successes, n, alpha=1 - confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx(expected, abs=1e-9)


def test_wilson_interval_of_nothing_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("counts", [(5, 4), (-1, 4)])
def test_impossible_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        wilson_interval(*counts)


def test_mcnemar_gives_the_published_example() -> None:
    """Fagerland, Lydersen and Laake: 16 against 6 discordant pairs, exact two-sided P = 0.0525."""
    assert 2 * mcnemar_p(6, 16) == pytest.approx(0.052479, abs=5e-7)


@pytest.mark.parametrize(("improved", "regressed"), list(itertools.product((0, 1, 4, 9), (1, 5, 12, 30))))
def test_mcnemar_equals_scipy_and_statsmodels(improved: int, regressed: int) -> None:
    p_value = mcnemar_p(improved, regressed)
    n = improved + regressed
    assert p_value == pytest.approx(binomtest(improved, n, alternative="less").pvalue)
    two_sided = mcnemar([[10, improved], [regressed, 10]], exact=True).pvalue
    if regressed > improved:
        assert min(1.0, 2 * p_value) == pytest.approx(two_sided)


def test_without_discordant_pairs_mcnemar_never_rejects() -> None:
    assert mcnemar_p(0, 0) == 1.0


def test_five_regressions_are_enough_and_four_never_are() -> None:
    assert mcnemar_p(0, 5) < 0.05 < mcnemar_p(0, 4)


def test_tango_interval_gives_the_published_example() -> None:
    """Fagerland, Lydersen and Laake: 6 against 16 of 161 pairs, -0.0621 (-0.1240 to -0.0054) at 95 %."""
    assert tango_interval(6, 16, 161, 0.95) == pytest.approx((-0.1240, -0.0054), abs=5e-5)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 300))
def test_tango_interval_is_a_score_interval(improved: int, regressed: int, rest: int) -> None:
    """It holds the estimate, mirrors when the models change places, and its ends have a score statistic of z."""
    n = improved + regressed + rest
    low, high = tango_interval(improved, regressed, n, 0.90)
    assert -1 <= low <= (improved - regressed) / n <= high <= 1
    assert tango_interval(regressed, improved, n, 0.90) == pytest.approx((-high, -low), abs=1e-9)
    for end in (low, high):
        assert abs(score_statistic(improved, regressed, n, end)) == pytest.approx(1.6448536, abs=1e-4)


def score_statistic(improved: int, regressed: int, n: int, difference: float) -> float:
    """Tango's z, with the nuisance parameter found by a search over the likelihood instead of by formula."""
    low, high = max(0.0, -difference), (1 - difference) / 2
    for _ in range(200):  # golden section on log-likelihood in the probability of a regression
        left, right = low + 0.382 * (high - low), low + 0.618 * (high - low)
        if likelihood(improved, regressed, n, difference, left) < likelihood(improved, regressed, n, difference, right):
            low = left
        else:
            high = right
    variance = 2 * low + difference - difference**2
    return (improved - regressed - n * difference) / math.sqrt(n * variance)


def likelihood(improved: int, regressed: int, n: int, difference: float, q: float) -> float:
    terms = ((improved, q + difference), (regressed, q), (n - improved - regressed, 1 - 2 * q - difference))
    return sum(count * math.log(p) if p > 0 else -math.inf for count, p in terms if count)


def test_tango_interval_of_nothing_is_everything() -> None:
    assert tango_interval(0, 0, 0) == (-1.0, 1.0)


def test_holm_equals_statsmodels() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9):
        p_values = rng.uniform(0, 0.2, size).tolist()
        assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist())
    assert holm([]) == []


def discordant_draws(n: int, improve: float, regress: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    counts = np.random.default_rng(seed).multinomial(n, [improve, regress, 1 - improve - regress], size=DRAWS)
    return counts[:, 0], counts[:, 1]


def share_of(decision: object, improved: np.ndarray, regressed: np.ndarray) -> float:
    """Share of draws for which decision(improved, regressed) holds, evaluated once a pair of counts."""
    pairs, times = np.unique(np.stack([improved, regressed]), axis=1, return_counts=True)
    return sum(int(count) for (b, c), count in zip(pairs.T, times, strict=True) if decision(int(b), int(c))) / DRAWS  # type: ignore[operator]


@pytest.mark.parametrize("discordance", [0.04, 0.10, 0.30])
def test_equally_good_models_fail_mcnemar_at_most_in_alpha_of_all_cases(discordance: float) -> None:
    improved, regressed = discordant_draws(256, discordance / 2, discordance / 2, seed=1)
    assert share_of(lambda b, c: mcnemar_p(b, c) < 0.05, improved, regressed) <= 0.05 + MONTE_CARLO


def test_holm_keeps_the_family_wise_error_over_suites() -> None:
    """Six suites, none of them worse: seldom does even one fail."""
    suites = [discordant_draws(256, 0.05, 0.05, seed=10 + i) for i in range(6)]
    table = {(b, c): mcnemar_p(b, c) for b in range(60) for c in range(60)}
    fails = sum(min(holm([table[int(b[i]), int(c[i])] for b, c in suites])) < 0.05 for i in range(DRAWS))
    assert fails / DRAWS <= 0.05 + MONTE_CARLO


@pytest.mark.parametrize("discordance", [0.06, 0.10, 0.20])
@pytest.mark.parametrize("n", [128, 256])
def test_a_drop_as_large_as_the_margin_passes_in_about_alpha_of_all_cases(n: int, discordance: float) -> None:
    """The score interval is asymptotic: half a point above nominal is what it may need."""
    improved, regressed = discordant_draws(n, (discordance - 0.05) / 2, (discordance + 0.05) / 2, seed=n)
    passes = share_of(lambda b, c: is_non_inferior(b, c, n, 0.05), improved, regressed)
    assert passes <= 0.05 + 0.005 + MONTE_CARLO


@pytest.mark.parametrize(("improve", "regress"), [(0.05, 0.05), (0.02, 0.06), (0.0, 0.03), (0.10, 0.20)])
def test_tango_interval_covers_the_true_difference(improve: float, regress: float) -> None:
    improved, regressed = discordant_draws(256, improve, regress, seed=3)

    def covers(b: int, c: int) -> bool:
        low, high = tango_interval(b, c, 256, 0.90)
        return low <= improve - regress <= high

    assert 0.89 - MONTE_CARLO <= share_of(covers, improved, regressed) <= 0.93


@pytest.mark.parametrize("clusters", [12, 40])
def test_the_bootstrap_interval_misses_about_alpha_on_each_side(clusters: int) -> None:
    """Skewed clusters, as KL is. Plain percentiles miss the mean above in 13 % (12 clusters) and 9 % (40 clusters)."""
    draws, rng = 500, np.random.default_rng(4)
    truth = math.exp(0.5**2 / 2)
    below = above = 0
    for values in rng.lognormal(0.0, 0.5, size=(draws, clusters)):
        low, high = bootstrap_mean(values, num_resamples=999, confidence=0.90).interval
        below += high < truth
        above += low > truth
    slack = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert below / draws <= {12: 0.07, 40: 0.06}[clusters] + slack
    assert above / draws <= 0.05 + slack


def test_the_bootstrap_agrees_with_students_t_on_normal_clusters() -> None:
    values = np.random.default_rng(5).normal(2.0, 0.3, 60)
    estimate = bootstrap_mean(values, confidence=0.90)
    half_width = 1.671 * values.std(ddof=1) / math.sqrt(60)  # t of 59 degrees of freedom at 95 %
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.interval == pytest.approx((values.mean() - half_width, values.mean() + half_width), abs=0.01)
    assert estimate == bootstrap_mean(values, confidence=0.90)


def test_weights_are_sizes_of_clusters() -> None:
    weighted = bootstrap_mean([1.0, 4.0, 2.0] * 4, weights=[2, 1, 3] * 4)
    assert weighted.value == pytest.approx((2 * 1 + 4 + 3 * 2) / 6)
    assert math.isfinite(weighted.interval[1])
    assert weighted.interval[0] < weighted.value < weighted.interval[1]


def test_equal_clusters_give_a_point_and_few_clusters_give_no_end() -> None:
    assert bootstrap_mean([0.0] * 9).interval == (0.0, 0.0)
    for few in ([0.3], [0.3] * 7, [0.1, 0.2, 0.9]):
        assert bootstrap_mean(few).interval == (-math.inf, math.inf)


def test_the_bootstrap_does_not_depend_on_where_zero_is() -> None:
    """Multiplied out, the squares of nearly equal clusters cancel, and the interval had no width."""
    low, high = bootstrap_mean(np.arange(10) * 1e-9).interval
    shifted = bootstrap_mean(3 + np.arange(10) * 1e-9)
    assert shifted.interval[1] - shifted.interval[0] == pytest.approx(high - low, rel=1e-5)


@pytest.mark.parametrize("size", [1e-300, 1e-9, 1.0, 1e300])
def test_the_bootstrap_does_not_depend_on_the_unit(size: float) -> None:
    values = np.arange(10.0)
    expected = np.asarray(bootstrap_mean(values).interval) * size
    assert bootstrap_mean(values * size).interval == pytest.approx(tuple(expected), rel=1e-9, abs=0)


def test_one_cluster_beside_equal_ones_has_no_end_on_its_side() -> None:
    low, high = bootstrap_mean([0.0] * 20 + [1.0]).interval
    assert math.isfinite(low)
    assert high == math.inf
    assert bootstrap_mean([1.0] * 20 + [0.0]).interval[0] == -math.inf


def test_few_clusters_that_differ_miss_no_more_than_others() -> None:
    """Of 60 clusters each is 1 with probability 1/50, else 0: the interval's upper end is seldom below the truth."""
    rng, draws = np.random.default_rng(11), 400
    missed = sum(
        bootstrap_mean(values, num_resamples=499).interval[1] < 1 / 50
        for values in (rng.random((draws, 60)) < 1 / 50).astype(float)
        if values.any()
    )
    assert missed / draws <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)


def test_a_cluster_that_outweighs_all_others_counts_as_one() -> None:
    assert effective_clusters([1.0] * 8) == pytest.approx(8)
    assert effective_clusters([1000.0] + [1.0] * 30) < 1.1
    assert bootstrap_mean([0.1, 0.2] * 20, weights=[1000.0] + [1.0] * 39).interval == (-math.inf, math.inf)


def test_an_interval_shown_stays_in_range_and_needs_a_width() -> None:
    assert Estimate(0.9, (0.7, 1.2), 0.95, 9).cut_to(0, 1) == (0.7, 1.0)
    assert Estimate(0.1, (-3.0, 0.4), 0.95, 9).cut_to(0, math.inf) == (0.0, 0.4)
    assert Estimate(1.0, (1.0, 1.0), 0.95, 9).cut_to(0, 1) is None
    assert Estimate(0.5, (-math.inf, math.inf), 0.95, 3).cut_to(0, 1) is None


@pytest.mark.parametrize(("values", "weights"), [([], None), ([math.nan, 1], None), ([1, 2], [1]), ([1, 2], [1, 0])])
def test_bootstrap_refuses_what_has_no_mean(values: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ValueError, match="vectors of one length"):
        bootstrap_mean(values, weights=weights)


def test_perplexity_is_the_exponential_of_the_mean_and_of_its_ends() -> None:
    delta = [0.1, 0.3, 0.2, 0.25] * 2
    mean, ratio = bootstrap_mean(delta, seed=7), bootstrap_perplexity(delta, seed=7)
    assert ratio.value == pytest.approx(math.exp(mean.value))
    assert ratio.interval == pytest.approx(tuple(math.exp(end) for end in mean.interval))
    assert bootstrap_perplexity([0.5]).interval == (0.0, math.inf)


def test_a_perplexity_that_no_float_holds_is_infinite() -> None:
    """A damaged model gives the right tokens thousands of nats; that is a result, not a reason to stop."""
    assert bootstrap_perplexity([5000.0 + i for i in range(9)]).value == math.inf


def test_median_ratio_covers_the_true_ratio_although_the_machine_drifts() -> None:
    rng = np.random.default_rng(6)
    drift = np.exp(np.cumsum(rng.normal(0, 0.1, (DRAWS, 5)), axis=1))
    noise = rng.standard_t(3, (2, DRAWS, 5)) * 0.02
    baseline, candidate = 30 * drift * np.exp(noise[0]), 42 * drift * np.exp(noise[1])
    covered = 0
    for a, b in zip(baseline.tolist(), candidate.tolist(), strict=True):
        low, high = median_ratio(a, b).interval
        covered += low <= 1.4 <= high
    assert covered / DRAWS >= 0.9375 - MONTE_CARLO


@pytest.mark.parametrize(
    ("pairs", "interval", "confidence"),
    [
        (1, (1, 1), 0.0),
        (3, (1, 3), 0.75),
        (5, (1, 5), 0.9375),
        (8, (2, 7), 1 - 2 * 9 / 256),
        (11, (3, 9), 1 - 2 * 67 / 2048),
    ],
)
def test_median_ratio_drops_as_many_extremes_as_the_binomial_allows(
    pairs: int, interval: tuple[int, int], confidence: float
) -> None:
    estimate = median_ratio([1.0] * pairs, [float(i) for i in range(pairs, 0, -1)], 0.90)
    assert estimate.interval == interval
    assert estimate.confidence == pytest.approx(confidence)
    assert estimate.value == (pairs + 1) / 2


@pytest.mark.parametrize("rates", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_median_ratio_refuses_unpaired_rates(rates: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="rates"):
        median_ratio(*rates)
