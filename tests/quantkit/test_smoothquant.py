"""The scale that SmoothQuant folds: what is searched, against scipy and against every single alpha."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from quantkit.architectures import Fold
from quantkit.calibration.statistics import InputStatistics
from quantkit.scheme import InputScheme, QuantScheme
from quantkit.transforms.smoothquant import NORM, WANTED, Options, balance, search

DYNAMIC = QuantScheme(8, -1, input=InputScheme())
STATIC = QuantScheme(8, -1, input=InputScheme(dynamic=False))
ALPHAS = tuple(step / 10 for step in range(11))
FOLD = Fold("norm", ("first", "second"))


class Block(nn.Module):
    """A norm and the two layers that read it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(columns)
        self.first, self.second = nn.Linear(columns, rows, bias=False), nn.Linear(columns, rows, bias=False)


def _problem(x: Tensor, rows: int = 24) -> tuple[Block, InputStatistics]:
    block = Block(x.shape[1], rows)
    statistics = InputStatistics(x.shape[1], WANTED)
    for rows_of_x in x.split(64):  # the sample takes so many of each
        statistics.add(rows_of_x)
    return block, statistics


def _schemes(scheme: QuantScheme) -> Mapping[str, QuantScheme]:
    return dict.fromkeys(FOLD.consumers, scheme)


def _errors(x: Tensor, scheme: QuantScheme) -> tuple[str, float, dict[float, float]]:
    """What the search chose, its error as a share of the unchanged layer's, and the same of each alpha."""
    block, statistics = _problem(x)
    found = search(FOLD, block, _schemes(scheme), statistics, Options(), torch.bfloat16).record
    alone = {}
    for alpha in ALPHAS:
        scale = search(FOLD, block, _schemes(scheme), statistics, Options(alpha=alpha), torch.bfloat16).scale
        alone[alpha] = _error(block, x, scale, scheme) / _error(block, x, torch.ones_like(scale), scheme)
    return found["scale"], found["error_ratio"], alone


def _error(block: Block, x: Tensor, scale: Tensor, scheme: QuantScheme) -> float:
    """Error of each token as a share of its output, summed; integers written out here."""
    weight = torch.cat([block.first.weight, block.second.weight]).detach()
    exact, smooth, scaled = x @ weight.T, x / scale, weight * scale
    step = (scaled.abs().amax(1, keepdim=True) / 127.5).bfloat16().float()
    rounded = (scaled / step).round().clamp(-128, 127) * step
    largest = smooth.abs().amax(1, keepdim=True) if scheme.input == InputScheme() else smooth.abs().max()
    inputs = (smooth / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)
    return float(((inputs @ rounded.T - exact).square().sum(1) / exact.square().sum(1)).sum())


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_the_balanced_scale_is_the_least_of_its_convex_cost(scheme: QuantScheme) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 8) * torch.tensor([1, 1, 1, 30, 1, 0.1, 1, 5.0])
    block, statistics = _problem(x)
    share = torch.rand(40) + 0.5
    found = balance(FOLD, block, _schemes(scheme), statistics, share, torch.ones(8))
    weight = torch.cat([block.first.weight, block.second.weight]).detach().abs().double().numpy()
    size, given = x.abs().double().numpy(), share.double().numpy()
    reach = size if scheme is DYNAMIC else np.repeat(size.max(0, keepdims=True), 40, 0)

    def cost(exponents: np.ndarray) -> float:
        s = np.exp(exponents)
        of_inputs = given @ np.linalg.norm(reach / s, NORM, axis=1) ** 2 * (s**2 @ (weight**2).sum(0))
        of_weights = (np.linalg.norm(weight * s, NORM, axis=1) ** 2).sum() * (given @ size**2 / s**2).sum()
        return float(np.log(of_inputs + of_weights))

    least = minimize(cost, np.zeros(8), method="BFGS").fun
    assert cost(found.log().double().numpy()) == pytest.approx(least, abs=2e-3)
    assert cost(np.zeros(8)) > least + 1


def test_a_token_that_is_large_by_itself_does_not_decide_the_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    x[:, ::16] *= 20
    x[7, 5] = 3000  # one token's own channel, as the first token of many models has
    chosen, ratio, alone = _errors(x, DYNAMIC)
    assert chosen == "balanced"
    assert ratio < 0.95 * min(alone.values())


def test_the_search_is_as_good_as_the_best_alpha_of_eleven() -> None:
    torch.manual_seed(0)
    for scheme in (DYNAMIC, STATIC):
        for outlier in (8.0, 30.0):
            x = torch.randn(128, 48)
            x[:, ::12] *= outlier
            _, ratio, alone = _errors(x, scheme)
            assert ratio <= 1.06 * min(1.0, *alone.values())


def test_tokens_that_are_nothing_and_columns_that_are_nothing_leave_numbers() -> None:
    x = torch.randn(64, 16)
    x[::2] = 0
    x[:, 3] = 0
    block, statistics = _problem(x)
    found = search(FOLD, block, _schemes(DYNAMIC), statistics, Options(), torch.bfloat16)
    assert torch.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    assert np.isfinite(found.record["error_ratio"])
