"""GPTQ against what the theory and a direct computation say."""

import pytest
import torch
from torch import Tensor

from quantkit.algorithms import ALGORITHMS, load_algorithm
from quantkit.algorithms.error_feedback import factor_inverse, solve_columns
from quantkit.algorithms.gptq import Options, gptq
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError, RecipeError
from quantkit.primitives import choose_qparams, dequantize, quantize
from quantkit.scheme import QuantScheme

SCHEME = QuantScheme(num_bits=4, group_size=32)
ASYMMETRIC = QuantScheme(num_bits=4, group_size=32, symmetric=False)
ALL_SCHEMES = [QuantScheme(bits, size, sym) for bits in (4, 8) for size in (32, -1) for sym in (True, False)]
PLAIN = Options(damp_fraction=(0.01,), scale_search="diagonal", scale_refit=False)


def _inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Correlated inputs with a few strong columns, as a language model has them."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    x[:, ::17] *= 8
    return x


def _statistics(x: Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1], Wanted(gram=True, held_out=True, columns=True))
    statistics.add(x, held_out=torch.arange(len(x)) % 8 == 7)
    return statistics


def _loss(weight: Tensor, quantized: Tensor, x: Tensor) -> float:
    return float(((weight - quantized) @ x.T).square().sum())


@pytest.mark.parametrize("columns", [96, 640], ids=["at-once", "in-pieces"])
def test_factor_is_the_upper_factor_of_the_damped_inverse(columns: int) -> None:
    hessian = _statistics(_inputs(4 * columns, columns)).hessian()
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(6))
    before = hessian.clone()
    factor, used = factor_inverse(hessian, order, 0.05)
    assert torch.equal(hessian, before)
    damped = hessian + 0.05 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    damped = damped[order][:, order]
    assert used == 0.05
    assert torch.equal(factor, torch.triu(factor))
    torch.testing.assert_close(factor.double().T @ factor.double(), torch.linalg.inv(damped), rtol=1e-4, atol=1e-5)


def test_damping_is_raised_until_the_matrix_can_be_factored_and_recorded() -> None:
    x = _inputs(300, 64)
    statistics = _statistics(x)
    broken = statistics.hessian()
    broken -= 0.03 * broken.diagonal().mean() * torch.eye(64, dtype=torch.float64)  # smallest eigenvalues negative
    _, used = factor_inverse(broken, torch.arange(64), 0.001)
    assert used == pytest.approx(0.1)
    with pytest.raises(QuantizationError, match="cannot be factored"):
        factor_inverse(torch.full((8, 8), torch.nan, dtype=torch.float64), torch.arange(8), 0.01)


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
    solution = gptq(weight, statistics, SCHEME, PLAIN, torch.float32)
    assert torch.equal(solution.weight.codes, quantize(weight, solution.weight.scale, SCHEME))


@pytest.mark.parametrize("seed", range(5))
def test_gptq_loses_less_than_rtn_on_the_calibration_inputs(seed: int) -> None:
    x = _inputs(500, 128, seed)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    scale = choose_qparams(weight, SCHEME, torch.bfloat16)[0]
    rtn = dequantize(quantize(weight, scale, SCHEME), scale)
    solution = gptq(weight, _statistics(x), SCHEME, Options(), torch.bfloat16)
    assert _loss(weight, solution.weight.dequantize(), x) < 0.6 * _loss(weight, rtn, x)
    assert solution.weight.codes.dtype == torch.int8
    assert solution.weight.scale.dtype == torch.bfloat16
    assert int(solution.weight.codes.min()) >= -8
    assert int(solution.weight.codes.max()) <= 7


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=str)
def test_columns_follow_algorithm_1_of_the_paper(scheme: QuantScheme) -> None:
    x = _inputs(300, 64).double()
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(4)) + 0.3
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    hessian = x.T @ x / 300
    scale, zero_point = choose_qparams(weight, scheme, torch.bfloat16)
    factor, _ = factor_inverse(hessian, order, 0.01)
    codes = solve_columns(weight, scale, zero_point, factor, order, scheme, block_size=24)

    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    inverse = torch.linalg.inv(damped[order][:, order])
    w, expected = weight.double()[:, order], torch.empty(6, 64)
    for i in range(64):  # the update of optimal brain surgeon in float64: no blocks, no Cholesky factor
        column = int(order[i])
        group = column // (64 // scale.shape[1])
        step = scale[:, group].double()
        zero = torch.zeros(6) if zero_point is None else zero_point[:, group].double()
        expected[:, column] = (torch.round(w[:, i] / step) + zero).clamp(scheme.code_min, scheme.code_max)
        error = (w[:, i] - (expected[:, column] - zero) * step) / inverse[i, i]
        w -= error[:, None] * inverse[i][None]
        inverse -= inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    agree = (codes == expected.to(torch.int8)).float().mean()
    assert agree > 0.99  # ties and the float32 factor
    assert int((codes - expected.to(torch.int8)).abs().max()) <= 1


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


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=str)
def test_every_scheme_is_solved_and_beats_round_to_nearest(scheme: QuantScheme) -> None:
    x = _inputs(500, 128)
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(3)) + 0.5
    scale, zero_point = choose_qparams(weight, scheme, torch.bfloat16)
    rtn = dequantize(quantize(weight, scale, scheme, zero_point), scale, zero_point)
    weight_found = gptq(weight, _statistics(x), scheme, Options(), torch.bfloat16).weight
    assert (weight_found.zero_point is None) == scheme.symmetric
    assert int(weight_found.codes.min()) >= scheme.code_min
    assert int(weight_found.codes.max()) <= scheme.code_max
    assert _loss(weight, weight_found.dequantize(), x) < 0.6 * _loss(weight, rtn, x)


def test_stages_say_what_was_tried_and_the_best_held_out_error_wins() -> None:
    x = _inputs(700, 128)
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(9))
    statistics = _statistics(x)
    solution = gptq(weight, statistics, SCHEME, Options((0.003, 0.01, 0.1), "auto"), torch.bfloat16)
    stages = solution.stages
    assert stages["judged_by"] == "held-out windows"
    assert set(stages["scale_search"]["errors"]) == {"diagonal", "pivot"}
    assert set(stages["damp_fraction"]["errors"]) == {"0.003", "0.01", "0.1"}
    for stage in ("scale_search", "damp_fraction"):
        errors = stages[stage]["errors"]
        assert errors[f"{stages[stage]['chosen']}"] == min(errors.values())
    assert solution.damp_fraction == stages["damp_fraction"]["chosen"]
    refit = stages["scale_refit"]
    assert refit["errors"]["before"] == min(stages["damp_fraction"]["errors"].values())
    assert refit["kept"] == (refit["errors"]["after"] < refit["errors"]["before"])


@pytest.mark.parametrize("refit", [False, True])
def test_held_out_windows_choose_and_all_windows_solve(refit: bool) -> None:
    x = _inputs(700, 128)
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(9))
    chosen = gptq(weight, _statistics(x), SCHEME, Options((0.01, 0.1), "auto", refit), torch.bfloat16)
    stages = chosen.stages
    all_windows = InputStatistics(128, Wanted(gram=True))
    all_windows.add(x)
    keeps = refit and stages["scale_refit"]["kept"]
    forced = Options((chosen.damp_fraction,), stages["scale_search"]["chosen"], scale_refit=False)
    expected = gptq(weight, all_windows, SCHEME, forced, torch.bfloat16).weight
    assert torch.equal(chosen.weight.codes, expected.codes)
    assert torch.equal(chosen.weight.scale, expected.scale) != keeps


def test_rows_are_solved_alone() -> None:
    x = _inputs(300, 64)
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(10))
    both = gptq(weight, _statistics(x), ASYMMETRIC, PLAIN, torch.bfloat16).weight
    one, two = both.split([5, 7])
    alone = gptq(weight[5:], _statistics(x), ASYMMETRIC, PLAIN, torch.bfloat16).weight
    assert torch.equal(torch.cat([one.codes, two.codes]), both.codes)
    assert torch.equal(two.codes, alone.codes)
    assert alone.zero_point is not None
    assert two.zero_point is not None
    assert torch.equal(two.zero_point, alone.zero_point)


def test_a_single_window_judges_itself_and_that_is_said() -> None:
    statistics = InputStatistics(64, Wanted(gram=True, held_out=True))
    statistics.add(_inputs(200, 64))
    solution = gptq(torch.randn(8, 64), statistics, SCHEME, Options(), torch.bfloat16)
    assert solution.stages["judged_by"] == "calibration windows"


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=str)
def test_outlier_columns_and_fewer_tokens_than_columns_stay_finite(scheme: QuantScheme) -> None:
    x = _inputs(20, 64)
    x[:, 9] = 1e5
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(11))
    weight[2] = 0
    solution = gptq(weight, _statistics(x), scheme, Options(), torch.bfloat16)
    found = solution.weight.dequantize()
    assert torch.isfinite(found).all()
    assert (found[2] == 0).all()
    assert (found - weight).norm() < 0.5 * weight.norm()
    assert _loss(weight, found, x) < 1e-3 * float((weight @ x.T).square().sum())


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in ALGORITHMS), ("rtn", {"search": True})])
def test_every_algorithm_loads_and_quantizes(name: str, options: dict[str, bool]) -> None:
    algorithm = load_algorithm(name, options)
    for scheme in ALL_SCHEMES:
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(8))
        solution = algorithm.solve(weight, _statistics(_inputs(200, 64)), scheme, algorithm.options, torch.bfloat16)
        error = (solution.weight.dequantize() - weight).norm() / weight.norm()
        assert error < 0.25
        assert solution.weight.scale.shape == (8, scheme.num_groups(64))
        assert (solution.weight.zero_point is None) == scheme.symmetric


def test_rtn_with_search_loses_less_where_inputs_are_large_and_needs_tokens() -> None:
    x = _inputs(400, 64)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(12))
    for scheme in (SCHEME, ASYMMETRIC):
        plain, search = (
            algorithm.solve(weight, _statistics(x), scheme, algorithm.options, torch.bfloat16).weight.dequantize()
            for algorithm in (load_algorithm("rtn"), load_algorithm("rtn", {"search": True}))
        )
        importance = x.square().mean(0)
        before, after = (((found - weight).square() * importance).sum() for found in (plain, search))
        assert after < 0.8 * before
    algorithm = load_algorithm("rtn", {"search": True})
    with pytest.raises(QuantizationError, match="needs calibration tokens"):
        algorithm.solve(weight, None, SCHEME, algorithm.options, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gptqq", {}, "unknown algorithm 'gptqq'.*gptq, rtn"),
        ("gptq", {"damp": 1}, "damp"),
        ("gptq", {"damp_fraction": (0.0,)}, "damp_fraction=0"),
        ("gptq", {"scale_search": "block"}, "scale_search='block'; choose from auto, diagonal, pivot"),
        ("rtn", {"damp_fraction": 0.1}, "rtn"),
    ],
)
def test_wrong_algorithm_or_option_is_one_clear_line(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_algorithm(name, options)
