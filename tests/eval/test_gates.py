"""What one gate says about numbers whose truth is known, and that its sentence does not contradict itself."""

import math

import numpy as np
import pytest

from quantkit_eval.gates import judge_drop, judge_kl, judge_throughput
from quantkit_eval.reasons import PairedCounts, told_apart
from quantkit_eval.record_types import ThroughputBatch
from quantkit_eval.statistics import ALPHA, MIN_CLUSTERS, bootstrap_mean, mcnemar_p


def drop(both: int, improved: int, regressed: int, n: int, max_drop_pp: float = 5) -> dict[str, object]:
    counts = PairedCounts(both, improved, regressed, n)
    return dict(judge_drop("extract", "exact", counts, max_drop_pp, mcnemar_p(improved, regressed)))


@pytest.mark.parametrize(
    ("means", "tokens"),
    [
        ([0.02, 0.27], [100, 100]),
        ([0.02, 0.27], [100, 90]),
        ([0.0] * 3, [100] * 3),
        ([0.02] * 7, [100] * 7),
        ([0.02] * 40, [10_000] + [2] * 39),  # one document is nearly all of the text
    ],
)
def test_a_few_windows_decide_nothing(means: list[float], tokens: list[int]) -> None:
    for limit in (0.15, 1e-9):
        gate = judge_kl(means, tokens, limit)
        assert gate["verdict"] == "inconclusive"
        assert (gate["interval"], gate["confidence"]) == (None, None)
        assert gate["items_needed"] is not None
        assert gate["items_needed"] >= MIN_CLUSTERS > 0
        assert gate["items_needed"] > len(means)
        like_these = "" if gate["items_needed"] == MIN_CLUSTERS else " like these"
        assert f"so few windows give no interval: {gate['items_needed']} or more{like_these} would" in gate["reason"]
        if like_these:
            assert gate["reason"].endswith(f"({MIN_CLUSTERS} if all were of equal length).")


def test_a_divergence_is_never_shown_below_zero() -> None:
    gate = judge_kl([0.001 + 0.0001 * i for i in range(9)] + [0.4], [100] * 10, 0.1)
    assert gate["interval"] is not None
    assert gate["interval"][0] >= 0


def test_one_window_beside_equal_ones_passes_nothing() -> None:
    """Most draws hold no such window, so they say nothing about how much of the text is like it."""
    gate = judge_kl([0.0] * 20 + [1.0], [100] * 21, 0.1)
    assert (gate["verdict"], gate["interval"], gate["items_needed"]) == ("inconclusive", None, None)
    assert gate["reason"].endswith("but so few windows differ from the others that nothing is shown.")
    assert judge_kl([0.0] * 400 + [1.0] * 8, [100] * 408, 0.1)["verdict"] == "pass"


def test_windows_of_a_good_candidate_pass_seldom_when_it_is_not_good() -> None:
    """The KL of windows of a real model is about lognormal with a spread of 0.3 to 0.45; the limit is the true mean."""
    rng, draws = np.random.default_rng(3), 600
    truth = math.exp(0.45**2 / 2)
    passes = 0
    for values in rng.lognormal(0.0, 0.45, size=(draws, MIN_CLUSTERS)):
        passes += bootstrap_mean(values, num_resamples=999, confidence=0.90).interval[1] < truth
    assert passes / draws <= 0.065 + 2 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize(("both", "n"), [(0, 54), (0, 1000), (40, 1000), (50, 1000)])
def test_a_baseline_with_nothing_to_lose_passes_nothing(both: int, n: int) -> None:
    gate = drop(both, 0, 0, n)
    assert gate["verdict"] == "inconclusive"
    assert gate["items_needed"] is None
    assert "losing all of them would stay within the 5 percentage points" in str(gate["reason"])


@pytest.mark.parametrize(
    ("both", "regressed", "n", "margin_pp"), [(0, 50, 1000, 10), (10, 5, 100, 20), (0, 50, 1000, 5)]
)
def test_a_proven_loss_of_what_may_be_lost_fails_nothing(both: int, regressed: int, n: int, margin_pp: float) -> None:
    counts = PairedCounts(both=both, improved=0, regressed=regressed, n=n)
    assert counts.p_value < ALPHA
    gate = judge_drop("extract", "exact", counts, margin_pp, counts.p_value)
    assert (gate["verdict"], gate["items_needed"]) == ("inconclusive", None)
    assert f"losing all of them would stay within the {margin_pp} percentage points" in str(gate["reason"])


def test_a_candidate_that_is_proven_better_passes_however_bad_the_baseline_was() -> None:
    assert drop(0, 100, 0, 1000)["verdict"] == "pass"


def test_just_above_the_margin_there_is_something_to_lose() -> None:
    assert drop(60, 0, 0, 1000)["verdict"] == "pass"


def test_a_proven_loss_is_not_called_too_large_unless_it_is() -> None:
    small, large = drop(90, 0, 6, 128), drop(20, 0, 60, 128)
    assert small["verdict"] == large["verdict"] == "fail"
    assert "a loss is proven, not that it is too large, but it may be as large as" in str(small["reason"])
    assert "a loss of 46.9 percentage points is more than the 5 allowed" in str(large["reason"])


@pytest.mark.parametrize(
    ("value", "limit", "decimals", "text"),
    [(0.996, 1, 2, "0.996"), (1.004, 1, 2, "1.004"), (1.0, 1, 2, "1.00"), (1.28, 1, 2, "1.28"), (4.96, 5, 1, "4.96")],
)
def test_a_number_is_not_rounded_onto_its_limit(value: float, limit: float, decimals: int, text: str) -> None:
    assert told_apart(value, limit, decimals) == text


def speed(interval: list[float] | None, confidence: float | None, pairs: int) -> ThroughputBatch:
    ratio = {"value": 1.1, "interval": interval, "confidence": confidence, "method": "median"}
    rates = {"baseline_tok_per_s": [10.0] * pairs, "candidate_tok_per_s": [11.0] * pairs}
    return {"batch_size": 16, **rates, "ratio": ratio}  # type: ignore[typeddict-item]


def test_speed_that_just_misses_its_limit_says_so() -> None:
    gate = judge_throughput("decode_batch_16", speed([0.996, 1.28], 0.9375, 5), 1.0, is_same_model=False)
    assert gate["verdict"] == "inconclusive"
    assert "(between 0.996 and 1.28), where 1 is asked for" in gate["reason"]


def test_a_single_pair_has_no_interval_and_decides_nothing() -> None:
    gate = judge_throughput("decode_batch_16", speed(None, None, 1), 1.0, is_same_model=False)
    assert (gate["verdict"], gate["interval"], gate["items_needed"]) == ("inconclusive", None, 5)
    assert "between" not in gate["reason"]


@pytest.mark.parametrize("n", [6, 420])
def test_a_baseline_with_nothing_to_lose_is_not_told_to_ask_more(n: int) -> None:
    gate = judge_drop("extract", "exact", PairedCounts(both=0, regressed=0, improved=0, n=n), 5, 1.0)
    assert gate["verdict"] == "inconclusive"
    assert gate["items_needed"] is None
    assert "about" not in gate["reason"]
