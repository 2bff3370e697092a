"""What a comparison can find, against the decisions themselves: enumerated, and simulated."""

import numpy as np
import pytest
from scipy.stats import binom

from quantkit_eval.errors import OptionError
from quantkit_eval.gates import PairedCounts, judge_drop
from quantkit_eval.power import detectable_drop, items_to_pass, mcnemar_power, non_inferiority_power, power_table
from quantkit_eval.statistics import is_non_inferior, mcnemar_p

DRAWS = 10_000


def outcomes(n: int, discordance: float, drop: float, margin: float) -> dict[str, float]:
    """How often the gate itself says what, over simulated comparisons."""
    regress, improve = (discordance + drop) / 2, (discordance - drop) / 2
    counts = np.random.default_rng(n).multinomial(n, [improve, regress, 1 - discordance], size=DRAWS)
    pairs, times = np.unique(counts[:, :2], axis=0, return_counts=True)
    found = {"pass": 0.0, "fail": 0.0, "inconclusive": 0.0, "significant": 0.0}
    for (b, c), number in zip(pairs, times, strict=True):
        paired = PairedCounts(n - int(b) - int(c), int(b), int(c), n)
        verdict = judge_drop("extract", "exact", paired, 100 * margin, paired.p_value)["verdict"]
        found[verdict] += number / DRAWS
        found["significant"] += number / DRAWS * (paired.p_value < 0.05)
    return found


@pytest.mark.parametrize(("n", "discordance", "drop"), [(60, 0.2, 0.1), (250, 0.1, 0.05), (100, 0.3, 0.0)])
def test_power_is_what_simulated_gates_show(n: int, discordance: float, drop: float) -> None:
    seen = outcomes(n, discordance, drop, margin=0.05)
    assert mcnemar_power(n, discordance, drop) == pytest.approx(seen["significant"], abs=0.02)
    assert non_inferiority_power(n, discordance, 0.05, drop) == pytest.approx(seen["pass"], abs=0.02)


def test_power_is_the_sum_over_every_outcome() -> None:
    """Enumerated for a small suite, with the two tests as the gates call them."""
    n, discordance, drop, margin = 25, 0.4, 0.1, 0.2
    finds = passes = 0.0
    for pairs in range(n + 1):
        for regressed in range(pairs + 1):
            chance = binom.pmf(pairs, n, discordance) * binom.pmf(regressed, pairs, (1 + drop / discordance) / 2)
            finds += chance * (mcnemar_p(pairs - regressed, regressed) < 0.05)
            passes += chance * is_non_inferior(pairs - regressed, regressed, n, margin)
    assert mcnemar_power(n, discordance, drop) == pytest.approx(finds, abs=1e-8)
    assert non_inferiority_power(n, discordance, margin, drop) == pytest.approx(passes, abs=1e-8)


def test_equal_models_are_found_different_no_more_often_than_alpha() -> None:
    for n in (20, 100, 400):
        for discordance in (0.02, 0.1, 0.5):
            assert mcnemar_power(n, discordance, 0.0) <= 0.05


def test_a_detectable_drop_has_the_power_and_a_smaller_one_has_not() -> None:
    for n, discordance in ((100, 0.2), (256, 0.1), (1000, 0.05)):
        drop = detectable_drop(n, discordance)
        assert drop is not None
        assert mcnemar_power(n, discordance, drop) >= 0.8
        assert mcnemar_power(n, discordance, 0.95 * drop) < 0.8
    assert detectable_drop(40, 0.05) is None
    assert detectable_drop(0, 0.5) is None


@pytest.mark.parametrize(("discordance", "margin", "around"), [(0.05, 0.05, 124), (0.1, 0.05, 248), (0.2, 0.03, 1374)])
def test_items_for_a_margin_lie_a_little_above_the_large_sample_size(
    discordance: float, margin: float, around: int
) -> None:
    n = items_to_pass(discordance, margin)
    assert n is not None
    assert around <= n < 1.35 * around
    assert non_inferiority_power(n, discordance, margin) >= 0.8


@pytest.mark.parametrize(("discordance", "drop"), [(0.1, 0.2), (0.0, 0.0), (1.1, 0.1), (0.1, -0.1)])
def test_impossible_truths_are_refused(discordance: float, drop: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        mcnemar_power(100, discordance, drop)


def test_the_table_of_a_recipe() -> None:
    suites: dict[str, dict[str, object]] = {"extract": {"num_items": 300}, "tools": {}, "nll": {}}
    rows = power_table(suites, {"extract": 5.0}, (0.05, 0.1))
    assert [(row["suite"], row["num_items"], row["discordance"]) for row in rows] == [
        ("extract", 300, 0.05),
        ("extract", 300, 0.1),
        ("tools", 99, 0.05),
        ("tools", 99, 0.1),
    ]
    assert rows[0]["pass_probability"] > 0.8 > rows[3]["discordance"]
    assert rows[0]["items_to_pass"] < rows[1]["items_to_pass"]
    assert rows[2]["margin_pp"] is rows[2]["pass_probability"] is rows[2]["items_to_pass"] is None
    alone, among = rows[1], power_table(suites, {"extract": 5.0, "tools": 5.0}, (0.1,))[0]
    assert among["detectable_drop_pp"] > alone["detectable_drop_pp"]


def test_the_table_refuses_what_cannot_be_run() -> None:
    for suites in ({"extrct": {}}, {"extract": {"items": 3}}, {"mine": {"kind": "file", "path": "no-such-file"}}):
        with pytest.raises(OptionError):
            power_table(suites, {}, (0.1,))  # type: ignore[arg-type]
