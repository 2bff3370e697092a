"""rms_norm: the reference against transformers, the Triton kernel against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels import reference

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
AssertNear = Callable[[Tensor, Tensor], None]


@pytest.fixture
def triton_norm() -> Callable[..., Any]:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_norm import rms_norm

    return rms_norm


def make_rows(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a stride, a residual with another one, weights."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = (3 * torch.randn(rows, columns + 5, generator=generator)).to(dtype)[:, :columns]
    residual = torch.randn(rows, columns + 8, generator=generator).to(dtype)[:, :columns]
    return x, residual, torch.randn(columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_transformers(dtype: torch.dtype, assert_near: AssertNear) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, _, weight = make_rows(7, 96, dtype)
    for kind, offset in ((LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        norm = kind(96, eps=1e-5).to(dtype)
        norm.weight.data = weight
        assert_near(reference.rms_norm(x, weight, 1e-5, offset=offset), norm(x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 576), (16, 100), (63, 33), (2, 2100)])
def test_the_kernel_equals_the_reference(
    triton_norm: Callable[..., Any], assert_near: AssertNear, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x, residual, weight = make_rows(rows, columns, dtype)
    before = x.clone(), residual.clone()
    assert_near(triton_norm(x, weight, 1e-5, offset=1.0), reference.rms_norm(x, weight, 1e-5, offset=1.0))
    actual = triton_norm(x, weight, 1e-5, residual=residual)
    wanted = reference.rms_norm(x, weight, 1e-5, residual=residual)
    assert_near(actual[0], wanted[0])
    assert torch.equal(actual[1], wanted[1])  # one addition, rounded once: exact
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_no_row_is_legal(triton_norm: Callable[..., Any]) -> None:
    assert triton_norm(torch.zeros(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize("body", ["reference", "triton"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(8), torch.ones(8), None), r"x is torch.float32 \[8\], allowed is torch.float32 or .* \[T, K\]"),
        ((torch.zeros(2, 8).double(), torch.ones(8), None), r"x is torch.float64 .* torch.bfloat16 or torch.float16"),
        ((torch.zeros(8, 2).t(), torch.ones(8), None), r"x has the stride 2 along its last dimension, allowed is 1"),
        ((torch.zeros(2, 8), torch.ones(9), None), r"weight is torch.float32 \[9\], allowed is .* \[8\]"),
        ((torch.zeros(2, 8), torch.ones(8, device="meta"), None), r"weight is on meta, allowed is the device of"),
        ((torch.zeros(2, 8), torch.ones(8), torch.zeros(3, 8)), r"residual is .* \[3, 8\], allowed is .* \[2, 8\]"),
        ((torch.zeros(2, 8), torch.ones(8), torch.zeros(2, 8).half()), r"residual is torch.float16 .* torch.float32 "),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    triton_norm: Callable[..., Any], body: str, arguments: tuple[Tensor, Tensor, Tensor | None], message: str
) -> None:
    norm = reference.rms_norm if body == "reference" else triton_norm
    x, weight, residual = arguments
    with pytest.raises(ValueError, match=message):
        norm(x, weight, 1e-5, residual=residual)


def test_rows_that_no_program_holds_are_refused(triton_norm: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="x has 40000 columns, allowed is up to 32768"):
        triton_norm(torch.zeros(1, 40000), torch.ones(40000), 1e-5)
