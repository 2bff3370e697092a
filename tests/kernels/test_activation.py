"""silu_mul and gelu_mul: the references against torch, the Triton kernels against the references."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels import reference

pytestmark = [
    pytest.mark.usefixtures("unwritten_is_nan"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # exp of a large gate is inf, as meant
]
AssertNear = Callable[[Tensor, Tensor], None]


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels import triton_activation

    return triton_activation


def make_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (4 * torch.randn(rows, 2 * columns + 3, generator=generator)).to(dtype)[:, : 2 * columns]


def test_the_references_are_torchs() -> None:
    x = make_rows(5, 40, torch.float32)
    gate, up = x[:, :40].double(), x[:, 40:].double()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(reference.silu_mul(x).double(), gate * torch.sigmoid(gate) * up, **close)
    normal = torch.distributions.Normal(0.0, 1.0).cdf(gate)
    torch.testing.assert_close(reference.gelu_mul(x, tanh=False).double(), gate * normal * up, **close)
    wanted = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(reference.gelu_mul(x, tanh=True).double(), wanted, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 100), (16, 33), (63, 8), (2, 1100)])
def test_the_kernels_equal_the_references(
    kernels: ModuleType, assert_near: AssertNear, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = make_rows(rows, columns, dtype)
    assert_near(kernels.silu_mul(x), reference.silu_mul(x))
    for tanh in (False, True):
        assert_near(kernels.gelu_mul(x, tanh), reference.gelu_mul(x, tanh))


def test_large_gates_do_not_become_nan(kernels: ModuleType, assert_near: AssertNear) -> None:
    x = torch.tensor([[-1e4, -300.0, 300.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert_near(kernels.silu_mul(x), torch.tensor([[0.0, 0.0, 300.0, 1e4]]))
    for tanh in (False, True):
        assert_near(kernels.gelu_mul(x, tanh), torch.tensor([[0.0, 0.0, 300.0, 1e4]]))


def test_no_row_is_legal(kernels: ModuleType) -> None:
    assert kernels.silu_mul(torch.zeros(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("body", ["reference", "triton"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(8), r"x is torch.float32 \[8\], allowed is torch.float32 or .* \[T, 2F\]"),
        (torch.zeros(2, 8).long(), r"x is torch.int64 \[2, 8\], allowed is torch.float32 or torch.bfloat16"),
        (torch.zeros(8, 2).t(), r"x has the stride 2 along its last dimension, allowed is 1"),
        (torch.zeros(2, 7), r"x has 7 columns, allowed is an even number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kernels: ModuleType, body: str, x: Tensor, message: str) -> None:
    module = reference if body == "reference" else kernels
    with pytest.raises(ValueError, match=message):
        module.silu_mul(x)
    with pytest.raises(ValueError, match=message):
        module.gelu_mul(x, True)
