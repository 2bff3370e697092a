"""GPTQ and the scale search against what the theory and a direct computation say."""

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import ALGORITHMS, load_algorithm
from quantkit.algorithms.gptq import Options, factor_inverse, gptq, solve_columns
from quantkit.algorithms.scale_search import search_scales
from quantkit.calibration.statistics import InputStatistics, add_gram
from quantkit.errors import QuantizationError, RecipeError
from quantkit.primitives import absmax_scale, dequantize, quantize
from quantkit.scheme import QuantScheme

SCHEME = QuantScheme(num_bits=4, group_size=32)


def _inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Correlated inputs with a few strong columns, as a language model has them."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    x[:, ::17] *= 8
    return x


def _statistics(x: Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1])
    statistics.add(x)
    return statistics


def _loss(weight: Tensor, quantized: Tensor, x: Tensor) -> float:
    return float(((weight - quantized) @ x.T).square().sum())


def test_hessian_is_the_mean_outer_product_of_unmasked_tokens() -> None:
    x = _inputs(300, 700)
    mask = torch.arange(300) % 3 != 0
    statistics = InputStatistics(700)
    statistics.add(x[:100].view(1, 100, 700), mask[:100].view(1, 100))
    statistics.add(x[100:], mask[100:])
    kept = x[mask].double()
    assert statistics.num_tokens == int(mask.sum())
    torch.testing.assert_close(statistics.hessian(), kept.T @ kept / len(kept), rtol=1e-5, atol=1e-5)


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


def test_factor_is_the_upper_factor_of_the_damped_inverse() -> None:
    hessian = _statistics(_inputs(400, 96)).hessian()
    factor, used = factor_inverse(hessian, 0.05)
    damped = hessian + 0.05 * hessian.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    assert used == 0.05
    assert torch.equal(factor, torch.triu(factor))
    torch.testing.assert_close(factor.double().T @ factor.double(), torch.linalg.inv(damped), rtol=1e-4, atol=1e-5)


def test_damping_is_raised_until_the_matrix_can_be_factored_and_recorded() -> None:
    x = _inputs(300, 64)
    statistics = _statistics(x)
    broken = statistics.hessian()
    broken -= 0.03 * broken.diagonal().mean() * torch.eye(64, dtype=torch.float64)  # smallest eigenvalues negative
    _, used = factor_inverse(broken, 0.001)
    assert used == pytest.approx(0.1)
    with pytest.raises(QuantizationError, match="cannot be factored"):
        factor_inverse(torch.full((8, 8), torch.nan, dtype=torch.float64), 0.01)


def test_rank_deficient_hessian_is_solved_and_beats_rtn() -> None:
    x = _inputs(1, 64).repeat(40, 1)  # the same token again and again
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    solution = gptq(weight, _statistics(x), SCHEME, Options(), torch.bfloat16)
    rtn = dequantize(quantize(weight, solution.weight.scale, SCHEME), solution.weight.scale)
    assert torch.isfinite(solution.weight.dequantize()).all()
    assert _loss(weight, solution.weight.dequantize(), x) < 0.01 * _loss(weight, rtn, x)


def test_with_uncorrelated_inputs_gptq_is_round_to_nearest() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    statistics = InputStatistics(64)
    statistics.add(8 * torch.eye(64))
    solution = gptq(weight, statistics, SCHEME, Options(), torch.float32)
    assert torch.equal(solution.weight.codes, quantize(weight, solution.weight.scale, SCHEME))


@pytest.mark.parametrize("seed", range(5))
def test_gptq_loses_less_than_rtn_on_the_calibration_inputs(seed: int) -> None:
    x = _inputs(500, 128, seed)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    scale = absmax_scale(weight, SCHEME, torch.bfloat16)
    rtn = dequantize(quantize(weight, scale, SCHEME), scale)
    solution = gptq(weight, _statistics(x), SCHEME, Options(), torch.bfloat16)
    assert _loss(weight, solution.weight.dequantize(), x) < 0.6 * _loss(weight, rtn, x)
    assert solution.weight.codes.dtype == torch.int8
    assert solution.weight.scale.dtype == torch.bfloat16
    assert int(solution.weight.codes.min()) >= -8
    assert int(solution.weight.codes.max()) <= 7


def test_blocks_of_columns_do_not_change_the_result() -> None:
    x = _inputs(500, 96).double()
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(3))
    factor, _ = factor_inverse(x.T @ x / 500, 0.01)
    scale = absmax_scale(weight, SCHEME, torch.float32).repeat_interleave(32, 1)
    one = solve_columns(weight, scale, factor, SCHEME, 96)
    many = solve_columns(weight, scale, factor, SCHEME, 7)
    assert (one != many).float().mean() < 0.01  # only where float32 rounds a tie differently


def test_columns_follow_algorithm_1_of_the_paper() -> None:
    x = _inputs(300, 32).double()
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    factor, _ = factor_inverse(x.T @ x / 300, 0.01)
    scale = absmax_scale(weight, SCHEME, torch.float32).repeat_interleave(32, 1)
    expected, w, u = torch.empty(6, 32), weight.double().clone(), factor.double()
    for i in range(32):  # the paper's loop, no blocks, in float64
        expected[:, i] = (w[:, i] / scale[:, i]).round().clamp(-8, 7)
        error = (w[:, i] - expected[:, i] * scale[:, i]) / u[i, i]
        w[:, i:] -= error[:, None] * u[i, i:][None]
    assert torch.equal(solve_columns(weight, scale, factor, SCHEME, 8), expected.to(torch.int8))


def test_a_dead_column_gets_code_zero_and_does_not_widen_its_group() -> None:
    x = _inputs(400, 64)
    x[:, 5] = 0
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    weight[:, 5] = 1e5
    solution = gptq(weight, _statistics(x), SCHEME, Options(), torch.bfloat16)
    assert solution.dead_columns == 1
    assert (solution.weight.codes[:, 5] == 0).all()
    assert solution.weight.scale.abs().max() < 2


def test_all_dead_and_all_zero_layers_are_zero_and_finite() -> None:
    dead = gptq(torch.randn(4, 64), _statistics(torch.zeros(10, 64)), SCHEME, Options(), torch.bfloat16)
    zero = gptq(torch.zeros(4, 64), _statistics(_inputs(100, 64)), SCHEME, Options(), torch.bfloat16)
    for solution in (dead, zero):
        assert (solution.weight.dequantize() == 0).all()
        assert (solution.weight.scale != 0).all()


def test_without_tokens_gptq_refuses() -> None:
    with pytest.raises(QuantizationError, match="calibration tokens"):
        gptq(torch.randn(4, 64), InputStatistics(64), SCHEME, Options(), torch.bfloat16)


def test_searched_scales_are_as_good_as_an_exhaustive_sweep() -> None:
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(6))
    importance = torch.rand(64, generator=torch.Generator().manual_seed(7)) + 0.01
    scale = search_scales(weight, importance, SCHEME, torch.float32)

    def loss(scale: Tensor) -> Tensor:
        error = dequantize(quantize(weight, scale, SCHEME), scale) - weight
        return (error.square() * importance).view(10, 2, 32).sum(-1)

    cover = absmax_scale(weight, SCHEME, torch.float32) * 7.5 / 7
    trials = [loss(sign * fraction * cover) for fraction in torch.linspace(0.5, 1.0, 400) for sign in (1.0, -1.0)]
    exhaustive = torch.stack(trials).amin(0)
    assert loss(scale).sum() <= 1.02 * exhaustive.sum()
    assert (loss(scale) <= 1.15 * exhaustive).all()
    assert loss(scale).sum() < 0.85 * loss(absmax_scale(weight, SCHEME, torch.float32)).sum()
    assert (scale < 0).any()
    assert (scale > 0).any()


def test_scale_search_tolerates_dead_groups_and_tiny_weights() -> None:
    weight = torch.randn(3, 64) * 1e-30
    weight[1] = 0
    scale = search_scales(weight, torch.zeros(64), SCHEME, torch.bfloat16)
    assert torch.isfinite(scale).all()
    assert (scale != 0).all()


def test_every_algorithm_loads_and_names_its_source_of_truth() -> None:
    for name in ALGORITHMS:
        algorithm = load_algorithm(name)
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(8))
        solution = algorithm.solve(weight, _statistics(_inputs(200, 64)), SCHEME, algorithm.options, torch.bfloat16)
        error = (solution.weight.dequantize() - weight).norm() / weight.norm()
        assert error < 0.2
        assert solution.weight.scale.shape == (8, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gptqq", {}, "unknown algorithm 'gptqq'.*gptq, rtn"),
        ("gptq", {"damp": 1}, "damp"),
        ("gptq", {"damp_fraction": 0.0}, "damp_fraction=0"),
        ("rtn", {"damp_fraction": 0.1}, "rtn"),
    ],
)
def test_wrong_algorithm_or_option_is_one_clear_line(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_algorithm(name, options)
