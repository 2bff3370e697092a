"""rotary_embedding: the reference against transformers, the Triton kernel against the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit_kernels import reference

AssertNear = Callable[[Tensor, Tensor], None]
Rotary = Callable[..., None]


@pytest.fixture
def triton_rotary() -> Rotary:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_rotary import rotary_embedding

    return rotary_embedding


def make_case(
    tokens: int, heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as slices of one projection; cos and sin of random angles."""
    generator = torch.Generator().manual_seed(tokens + head_dim)
    projection = torch.randn(tokens, (heads + kv_heads + 1) * head_dim, generator=generator).to(dtype)
    q, k, _ = projection.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, 1), dim=1)
    angle = 6 * torch.rand(tokens, half, generator=generator)
    return q, k, angle.cos(), angle.sin()


def test_the_reference_is_transformers(assert_near: AssertNear) -> None:
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_pairs_side_by_side
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves

    for turn, half, interleaved in ((turn_halves, 16, False), (turn_pairs_side_by_side, 8, True)):
        q, k, cos, sin = make_case(5, 4, 2, 32, half, torch.float32)
        tables = (torch.cat([table, table], dim=-1)[None] for table in (cos, sin))
        wanted_q, wanted_k = turn(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *tables)
        reference.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
        assert_near(q, wanted_q[0].transpose(0, 1))
        assert_near(k, wanted_k[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "half"),
    [(1, 1, 1, 16, 8), (3, 9, 3, 64, 32), (16, 2, 1, 80, 20), (3, 5, 2, 24, 3)],
)
def test_the_kernel_equals_the_reference(
    triton_rotary: Rotary, assert_near: AssertNear, dtype: torch.dtype, interleaved: bool, tokens: int, heads: int,
    kv_heads: int, head_dim: int, half: int,
) -> None:  # fmt: skip
    case = make_case(tokens, heads, kv_heads, head_dim, half, dtype)
    projection, untouched = case[0]._base, case[0]._base.clone()  # type: ignore[union-attr]
    assert projection is not None
    wanted = [case[0].clone(), case[1].clone()]
    triton_rotary(*case, interleaved=interleaved)
    reference.rotary_embedding(*wanted, *case[2:], interleaved=interleaved)
    for actual, want in zip(case[:2], wanted, strict=True):
        assert_near(actual, want)
        assert torch.equal(actual[..., 2 * half :], want[..., 2 * half :])
    assert torch.equal(projection[:, -head_dim:], untouched[:, -head_dim:])  # what lies behind the keys


def test_many_heads_take_several_programs(triton_rotary: Rotary, assert_near: AssertNear) -> None:
    case = make_case(2, 33, 17, 128, 64, torch.float32)
    wanted = [case[0].clone(), case[1].clone()]
    triton_rotary(*case)
    reference.rotary_embedding(*wanted, *case[2:])
    assert_near(case[0], wanted[0])
    assert_near(case[1], wanted[1])


def test_no_token_is_legal(triton_rotary: Rotary) -> None:
    query, key, *turns = make_case(0, 2, 1, 16, 8, torch.float32)
    triton_rotary(query, key, *turns)
    assert query.shape == (0, 2, 16)
    assert key.shape == (0, 1, 16)


@pytest.mark.parametrize("body", ["reference", "triton"])
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[0], r"q is torch.float32 \[4, 16\], allowed is torch.float32 or .* \[T, H, D\]"),
        (0, lambda t: t[..., :8], r"k is .*, allowed is torch.float32 \[3, H_kv, 8\]"),
        (1, lambda t: t[:2], r"k is torch.float32 \[2, 2, 16\], allowed is torch.float32 \[3, H_kv, 16\]"),
        (1, lambda t: t.half(), r"k is torch.float16 .* allowed is torch.float32 \[3, H_kv, 16\]"),
        (2, lambda t: t[:2], r"cos is torch.float32 \[2, 8\], allowed is .* \[3, rot / 2\]"),
        (2, lambda t: t.repeat(1, 2), r"sin is .*, allowed is torch.float32 \[3, 16\]"),
        (3, lambda t: t.to("meta"), r"sin is on meta, allowed is the device of the first argument, cpu"),
        (3, lambda t: t.repeat(1, 2)[:, ::2], r"sin has the stride 2 along its last dimension, allowed is 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    triton_rotary: Rotary, body: str, index: int, change: Callable[[Tensor], Tensor], message: str
) -> None:
    rotary = reference.rotary_embedding if body == "reference" else triton_rotary
    case = list(make_case(3, 4, 2, 16, 8, torch.float32))
    case[index] = change(case[index])
    with pytest.raises(ValueError, match=message):
        rotary(*case)


def test_more_pairs_than_a_head_has_are_refused() -> None:
    q, k, *_ = make_case(3, 4, 2, 16, 8, torch.float32)
    wide = torch.zeros(3, 9)
    with pytest.raises(ValueError, match="cos has 9 columns, allowed is 1 to 8, half of D=16"):
        reference.rotary_embedding(q, k, wide, wide)
