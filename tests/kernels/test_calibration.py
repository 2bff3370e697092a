"""hessian_accumulate and gptq_columns: the references against the toolkit's own, the Triton bodies against both."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit_kernels
from quantkit.algorithms.error_feedback import factor_inverse, solve_columns
from quantkit.primitives import choose_qparams
from quantkit.scheme import QuantScheme
from quantkit_kernels import reference

AssertNear = Callable[[Tensor, Tensor], None]
BODIES = ["reference", "triton", "public"]


def body_of(operation: str, name: str) -> Callable[..., Any]:
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton, which is for Linux")
        from quantkit_kernels import triton_calibration

        return getattr(triton_calibration, operation)  # type: ignore[no-any-return]
    return getattr(reference if name == "reference" else quantkit_kernels, operation)  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 5), (37, 150), (65, 64)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_second_moment(
    tokens: int, columns: int, dtype: torch.dtype, is_masked: bool, body: str, assert_near: AssertNear
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, columns + 131), float("nan"), dtype=dtype)[:, :columns]
    x.copy_(torch.randn(tokens, columns, generator=generator))
    mask = torch.arange(tokens) % 3 != 1 if is_masked else None
    rows = (x if mask is None else x[mask]).double()
    if mask is not None:
        x[~mask] = float("nan")
    before = torch.randn(columns, columns, generator=generator)
    total = before.clone()
    body_of("hessian_accumulate", body)(x, total, mask)
    assert_near(total.triu(), (before + rows.T @ rows).float().triu())
    assert torch.equal(total.tril(-1), before.tril(-1))


@pytest.mark.parametrize("body", BODIES)
def test_no_token_changes_nothing(body: str) -> None:
    total = torch.ones(8, 8)
    body_of("hessian_accumulate", body)(torch.zeros(0, 8), total)
    body_of("hessian_accumulate", body)(torch.full((2, 8), float("nan")), total, torch.tensor([False, False]))
    assert torch.equal(total, torch.ones(8, 8))


def make_block(out_features: int, size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A weight with scales, zero points, and the factor of a Hessian whose columns depend on each other."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(out_features, size, generator=generator)
    mixed = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    scheme = QuantScheme(num_bits=4, group_size=size // 2, symmetric=symmetric)
    scale, zero_point = choose_qparams(weight, scheme, torch.bfloat16)
    factor, _ = factor_inverse((mixed.T @ mixed).double(), torch.arange(size), 0.01)
    return weight, scale, zero_point, factor


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("out_features", "size"), [(5, 4), (37, 24), (33, 48)])
def test_the_columns_of_a_block_get_the_codes_that_gptq_gives_them(
    out_features: int, size: int, symmetric: bool, body: str, unwritten_is_nan: None
) -> None:
    weight, scale, zero_point, factor = make_block(out_features, size, symmetric=symmetric)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    scheme = QuantScheme(num_bits=4, group_size=size // 2, symmetric=symmetric)
    wanted = solve_columns(weight, scale, zero_point, factor, order, scheme)
    columns = weight.T[order].contiguous()
    untouched = columns.clone()
    zeros = None if zero_point is None else zero_point.T.contiguous()
    solve = body_of("gptq_columns", body)
    codes, errors = solve(columns, scale.T.contiguous(), order // (size // 2), factor, -8, 7, zeros)
    assert torch.equal(columns, untouched)
    assert (wanted[:, order] != codes.T).float().mean() <= 0.002  # sums in another order may move a code at a tie
    assert size < 24 or codes.unique().numel() > 8
    used = codes.float() - (0 if zeros is None else zeros.float()[order // (size // 2)])
    rounding = columns - used * scale.T.float()[order // (size // 2)]
    torch.testing.assert_close(factor.T @ errors, rounding, rtol=1e-3, atol=1e-3)  # e solves the triangular system


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": torch.zeros(129, 6)}, "columns are 129, allowed are 1 to 128"),
        ({"scale": torch.ones(2, 5)}, r"scale is torch.float32 \[2, 5\], allowed is .* \[G, 6\]"),
        ({"group": torch.zeros(4, dtype=torch.int32)}, r"group is torch.int32 \[4\], allowed is torch.int64 \[4\]"),
        ({"factor": torch.eye(4).double()}, r"factor is torch.float64 .* allowed is torch.float32 \[4, 4\]"),
        ({"zero_point": torch.zeros(1, 6, dtype=torch.int8)}, r"zero_point is .* allowed is torch.int8 \[2, 6\]"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(change: dict[str, Tensor], message: str, body: str) -> None:
    good: dict[str, Any] = {
        "columns": torch.zeros(4, 6), "scale": torch.ones(2, 6), "group": torch.zeros(4, dtype=torch.int64),
        "factor": torch.eye(4), "code_min": -8, "code_max": 7,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        body_of("gptq_columns", body)(**(good | change))


@pytest.mark.parametrize("body", BODIES)
def test_inputs_that_do_not_fit_are_refused(body: str) -> None:
    add = body_of("hessian_accumulate", body)
    with pytest.raises(ValueError, match=r"total is torch.float32 \[4, 5\], allowed is torch.float32 \[4, 4\]"):
        add(torch.zeros(2, 4), torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"token_mask is torch.int64 \[2\], allowed is torch.bool \[2\]"):
        add(torch.zeros(2, 4), torch.zeros(4, 4), torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("operation", ["hessian_accumulate", "gptq_columns"])
def test_signatures_are_those_of_the_reference(operation: str) -> None:
    assert inspect.signature(body_of(operation, "triton")) == inspect.signature(getattr(reference, operation))
