"""Calibration through the kernels of a GPU, in Triton's interpreter: the codes that a CPU finds."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is for Linux")
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here; scripts/gpu_check proves them", allow_module_level=True)

from quantkit.algorithms import error_feedback
from quantkit.algorithms.gptq import Options, gptq
from quantkit.calibration import statistics
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.scheme import QuantScheme
from quantkit_kernels.interpreter import interpret_triton

ROWS, COLUMNS, TOKENS = 12, 64, 160


def inputs(dtype: torch.dtype) -> Tensor:
    """Correlated columns of different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator) / COLUMNS**0.5
    return ((torch.randn(TOKENS, COLUMNS, generator=generator) @ mixing) * torch.logspace(-1, 1, COLUMNS)).to(dtype)


def collect(x: Tensor) -> InputStatistics:
    found = InputStatistics(COLUMNS, Wanted(gram=True, held_out=True))
    found.add(x, token_mask=torch.arange(TOKENS) % 5 != 0, held_out=torch.arange(TOKENS) % 8 == 7)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is asked for."""
    counts = Counter[str]()
    for module, name in ((statistics, "hessian_accumulate"), (error_feedback, "gptq_columns")):
        kernel = getattr(module, name)

        def counted(*arguments: Any, name: str = name, kernel: Any = kernel) -> Any:
            counts[name] += 1
            return kernel(*arguments)

        monkeypatch.setattr(module, name, counted)
    return counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_bodies_sum_the_same_second_moments(dtype: torch.dtype, calls: Counter[str]) -> None:
    x = inputs(dtype)
    wanted = collect(x)
    assert not calls
    with interpret_triton():
        found = collect(x)
    assert calls["hessian_accumulate"] == 2  # of the windows that judge, and of the others
    assert found.num_held_out == wanted.num_held_out > 0
    for moment in ("hessian", "fit_hessian"):
        torch.testing.assert_close(getattr(found, moment)(), getattr(wanted, moment)(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "block_size"),
    [(QuantScheme(4, 32), 128), (QuantScheme(4, 32, symmetric=False), 40), (QuantScheme(8, -1), 512)],
    ids=str,
)
def test_both_bodies_find_the_same_codes(scheme: QuantScheme, block_size: int, calls: Counter[str]) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    second_moment, options = collect(inputs(torch.float32)), Options(block_size=block_size)
    wanted = gptq(weight, second_moment, scheme, options, torch.bfloat16)
    assert not calls
    with interpret_triton():
        found = gptq(weight, second_moment, scheme, options, torch.bfloat16)
    assert calls["gptq_columns"] == 2 * -(-COLUMNS // min(block_size, 128))  # a share of the rows is tried, then all
    assert torch.equal(found.weight.codes, wanted.weight.codes)
    assert torch.equal(found.weight.scale, wanted.weight.scale)
    assert (found.weight.zero_point is None) == scheme.symmetric


def test_statistics_lie_where_the_inputs_come_from() -> None:
    """Nothing is allocated on the CPU for inputs of another device; meta stands for one."""
    found = InputStatistics(8, Wanted(gram=True, held_out=True, columns=True), device=torch.device("meta"))
    kept = (found._gram, found._held_out, found._absmax, found._sum_abs, found._sum_square, found.sample)
    assert [None if tensor is None else tensor.device.type for tensor in kept] == ["meta"] * 6
