"""What is collected of a layer's inputs, against direct computations on the tokens that count."""

import pytest
import torch
from torch import Tensor

from quantkit.calibration.input_range import (
    MagnitudeHistogram,
    minmax_clip,
    mse_clip,
    percentile_clip,
    static_input_scale,
)
from quantkit.calibration.statistics import InputStatistics, Wanted, add_gram
from quantkit.primitives import fake_quantize_input
from quantkit.scheme import InputScheme

ALL = Wanted(gram=True, held_out=True, columns=True, histogram=True, sample=True)


def _inputs(tokens: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, ::17] *= 8
    return x


def test_every_statistic_is_that_of_the_tokens_that_count() -> None:
    x = _inputs(300, 70)
    mask, held_out = torch.arange(300) % 3 != 0, torch.arange(300) % 100 < 20
    statistics = InputStatistics(70, ALL)
    for part in (slice(0, 100), slice(100, 300)):
        statistics.add(x[part].view(1, -1, 70), mask[part].view(1, -1), held_out[part].view(1, -1))
    kept, fit, judge = x[mask].double(), x[mask & ~held_out].double(), x[mask & held_out].double()
    assert statistics.num_tokens == len(kept)
    assert statistics.num_held_out == len(judge)
    torch.testing.assert_close(statistics.fit_hessian(), fit.T @ fit / len(fit), rtol=1e-5, atol=1e-5)
    found, by = statistics.judge()
    assert by == "held-out windows"
    torch.testing.assert_close(found.double(), judge.T @ judge / len(judge), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.hessian(), kept.T @ kept / len(kept), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.mean_square.double(), kept.square().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(statistics.mean_abs.double(), kept.abs().mean(0), rtol=1e-5, atol=0)
    assert torch.equal(statistics.absmax.double(), kept.abs().amax(0))
    assert statistics.histogram is not None
    assert int(statistics.histogram.counts.sum()) == kept.numel()
    assert all((kept == row.double()).all(1).any() for row in statistics.sample)


def test_nothing_is_collected_that_is_not_wanted() -> None:
    statistics = InputStatistics(8, Wanted(columns=True))
    statistics.add(torch.ones(4, 8))
    assert statistics.histogram is None
    with pytest.raises(AssertionError, match="not collected"):
        statistics.hessian()
    assert Wanted(gram=True) | Wanted(columns=True) == Wanted(gram=True, columns=True)
    assert not Wanted()


def test_without_held_out_windows_the_rest_judges() -> None:
    statistics = InputStatistics(8, Wanted(gram=True, held_out=True))
    statistics.add(_inputs(50, 8), held_out=torch.zeros(50, dtype=torch.bool))
    found, by = statistics.judge()
    assert by == "calibration windows"
    torch.testing.assert_close(found, statistics.hessian().float())


def test_gram_of_tiles_equals_the_full_product() -> None:
    x = _inputs(50, 1100)
    total = torch.zeros(1100, 1100)
    add_gram(total, x)
    torch.testing.assert_close(torch.triu(total), torch.triu(x.T @ x), rtol=1e-4, atol=1e-4)


def test_not_finite_inputs_are_an_error() -> None:
    x = torch.ones(4, 8)
    x[2, 3] = torch.inf
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        InputStatistics(8).add(x)


def _histogram(x: Tensor) -> MagnitudeHistogram:
    histogram = MagnitudeHistogram()
    for part in x.split(1000):
        histogram.add(part)
    return histogram


def test_bins_hold_their_values() -> None:
    x = torch.tensor([0.0, 1e-38, 0.01, 1.0, 3.7, 1e5, 3e38])
    histogram = _histogram(-x)
    assert int(histogram.counts.sum()) == 7
    values = histogram.values()
    for size in x[2:].tolist():
        assert values[histogram.counts > 0].sub(size).abs().min() <= 0.033 * size
    assert torch.isfinite(values[:-16]).all()


def test_observers_find_the_largest_the_quantile_and_the_least_squares_clip() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200_000, generator=generator)
    x[:5] = 60.0
    histogram = _histogram(x)
    assert minmax_clip(histogram) == 60.0
    quantile = float(torch.quantile(x.abs().double()[:100_000], 0.9999))
    assert percentile_clip(histogram) == pytest.approx(quantile, rel=0.1)

    def error(clip: float) -> float:
        scale = torch.tensor(clip / 127.5)
        return float((fake_quantize_input(x, InputScheme(dynamic=False), scale) - x).double().square().sum())

    least = min(error(float(clip)) for clip in torch.linspace(3, 60, 300))
    assert error(mse_clip(histogram)) <= 1.05 * least
    assert error(mse_clip(histogram)) < 0.9 * error(60.0)


def test_the_scale_puts_the_clip_at_the_end_of_the_codes() -> None:
    histogram = _histogram(torch.tensor([0.5, -3.0, 2.0]))
    scale = static_input_scale(histogram, "minmax", torch.bfloat16)
    assert scale.shape == (1,)
    assert scale.dtype == torch.bfloat16
    assert float(scale) == pytest.approx(3 / 127.5, rel=4e-3)
    assert float(static_input_scale(_histogram(torch.zeros(4)), "mse", torch.float32)) == 1.0
    assert float(static_input_scale(_histogram(torch.zeros(4)), "percentile", torch.float32)) == 1.0
