"""Scales and zero points against exhaustive search, refitted scales against least squares."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.algorithms.scale_refit import refit_scales
from quantkit.algorithms.scale_search import search_qparams
from quantkit.primitives import QuantizedWeight, choose_qparams, dequantize, quantize
from quantkit.scheme import QuantScheme

SCHEMES = [QuantScheme(bits, 32, symmetric) for bits in (4, 8) for symmetric in (True, False)]


def _weight(rows: int = 10) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(6)) + 0.4


def _importance() -> Tensor:
    return torch.rand(64, generator=torch.Generator().manual_seed(7)) + 0.01


def _loss(weight: Tensor, scheme: QuantScheme, measure: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """[N, G] weighted error of rounding to nearest."""
    error = dequantize(quantize(weight, scale, scheme, zero_point), scale, zero_point) - weight
    return (error.square() * measure).view(len(weight), 2, 32).sum(-1)


def _exhaustive(weight: Tensor, scheme: QuantScheme, measure: Tensor) -> Tensor:
    """[N, G] least error over a fine grid of scales, of both signs, and all zero points."""
    reach = weight.view(-1, 2, 32).abs().amax(-1)
    zeros = [None] if scheme.symmetric else [torch.full(reach.shape, z, dtype=torch.int8) for z in range(-8, 8)]
    best = torch.full(reach.shape, float("inf"))
    for fraction in torch.linspace(0.4, 2.1, 300 if scheme.symmetric else 60):
        for sign in (1.0, -1.0) if scheme.symmetric else (1.0,):
            scale = sign * fraction * reach / (scheme.code_max if scheme.symmetric else 15)
            for zero in zeros:
                best = torch.minimum(best, _loss(weight, scheme, measure, scale, zero))
    return best


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_searched_grids_are_nearly_as_good_as_an_exhaustive_search(scheme: QuantScheme) -> None:
    weight, importance = _weight(), _importance()
    found = _loss(weight, scheme, importance, *search_qparams(weight, importance, scheme, torch.float32))
    plain = _loss(weight, scheme, importance, *choose_qparams(weight, scheme, torch.float32))
    assert found.sum() <= 1.12 * _exhaustive(weight, scheme, importance).sum()
    assert found.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_search_is_never_much_worse_than_the_extremes(scheme: QuantScheme) -> None:
    weight, importance = _weight(200), _importance()
    found = _loss(weight, scheme, importance, *search_qparams(weight, importance, scheme, torch.bfloat16))
    plain = _loss(weight, scheme, importance, *choose_qparams(weight, scheme, torch.bfloat16))
    assert found.sum() < plain.sum()


def test_symmetric_scales_take_both_signs_and_asymmetric_ones_do_not() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    symmetric, _ = search_qparams(weight, torch.ones(64), SCHEMES[0], torch.float32)
    asymmetric, zero_point = search_qparams(weight, torch.ones(64), SCHEMES[1], torch.float32)
    assert (symmetric < 0).any()
    assert (symmetric > 0).any()
    assert (asymmetric > 0).all()
    assert zero_point is not None
    assert zero_point.dtype == torch.int8
    assert int(zero_point.min()) >= -8
    assert int(zero_point.max()) <= 7


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_dead_groups_zeros_and_tiny_weights_get_a_usable_grid(scheme: QuantScheme) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)) * 1e-30
    weight[1] = 0
    weight[2] = 1.0
    scale, zero_point = search_qparams(weight, torch.zeros(64), scheme, torch.bfloat16)
    assert torch.isfinite(scale).all()
    assert (scale != 0).all()
    found = dequantize(quantize(weight, scale, scheme, zero_point), scale, zero_point)
    assert (found[1] == 0).all()
    torch.testing.assert_close(found[2], weight[2], rtol=5e-3, atol=0)


@pytest.mark.parametrize("scheme", [*SCHEMES, QuantScheme(8, -1)], ids=str)
def test_refitted_scales_are_the_least_squares_solution(scheme: QuantScheme) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(500, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight = _weight(5)
    scale, zero_point = choose_qparams(weight, scheme, torch.float32)
    quantized = QuantizedWeight(quantize(weight, scale * 1.3, scheme, zero_point), scale, scheme, zero_point)
    refitted = refit_scales(weight, quantized, x.T @ x / 500)
    centered = QuantizedWeight(quantized.codes, torch.ones_like(scale), scheme, zero_point).dequantize()
    groups = scale.shape[1]
    for row in range(5):
        design = (x.view(500, groups, -1) * centered[row].view(groups, -1)).sum(-1).double().numpy()
        expected = np.linalg.lstsq(design, (x @ weight[row]).double().numpy(), rcond=None)[0]
        np.testing.assert_allclose(refitted.scale[row].numpy(), expected, rtol=2e-2)
    assert torch.equal(refitted.codes, quantized.codes)


def test_a_refit_keeps_scales_of_groups_without_codes() -> None:
    weight = _weight(4)
    scale, _ = choose_qparams(weight, SCHEMES[0], torch.bfloat16)
    codes = quantize(weight, scale, SCHEMES[0])
    codes[:, :32] = 0
    refitted = refit_scales(weight, QuantizedWeight(codes, scale, SCHEMES[0]), torch.eye(64))
    assert torch.equal(refitted.scale[:, 0], scale[:, 0])
    nothing = refit_scales(weight, QuantizedWeight(torch.zeros_like(codes), scale, SCHEMES[0]), torch.eye(64))
    assert torch.equal(nothing.scale, scale)
