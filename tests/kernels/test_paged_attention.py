"""paged_attention: the reference against torch's own attention, the Triton kernels against the reference."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quantkit_kernels
from quantkit_kernels import cpu_native, reference
from quantkit_kernels.native_library import native_blocker
from quantkit_kernels.paged_attention_plan import SPLIT_KEYS, configuration, is_folded, kernel_constants, split_plan

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")
AssertNear = Callable[[Tensor, Tensor], None]
Case = tuple[tuple[Tensor, ...], dict[str, Any]]


@pytest.fixture
def native_attention() -> Callable[..., Tensor]:
    if native_blocker() is not None:
        pytest.skip(str(native_blocker()))
    return cpu_native.paged_attention


@pytest.fixture
def triton_attention() -> Callable[..., Tensor]:
    pytest.importorskip("triton", reason="needs triton, which is for Linux")
    from quantkit_kernels.triton_paged_attention import paged_attention

    return paged_attention


def make_case(
    query_lens: list[int], context_lens: list[int], heads: int, kv_heads: int, head_dim: int, value_dim: int,
    block_size: int, dtype: torch.dtype = torch.float32, *, is_int8: bool = False, is_joint: bool = False,
) -> Case:  # fmt: skip
    """Random sequences in scattered blocks; every slot that is no token of a sequence is NaN."""
    generator = torch.Generator().manual_seed(sum(context_lens) + head_dim)
    per_seq = max(1, -(-max(context_lens) // block_size)) + 1
    blocks = len(context_lens) * per_seq + 1
    tables = torch.randperm(blocks, generator=generator)[:-1].view(len(context_lens), per_seq).int()
    width = kv_heads * (head_dim + value_dim)
    buffer = torch.randn(blocks, block_size, width, generator=generator).to(dtype)
    is_used = torch.zeros(blocks, block_size, dtype=torch.bool)
    for table, length in zip(tables.long(), context_lens, strict=True):
        places = torch.arange(length)
        is_used[table[places // block_size], places % block_size] = True
    scales: dict[str, Tensor | None] = {"key_scale": None, "value_scale": None}
    if is_int8:
        buffer = (buffer.float() * 40).clamp_(-127, 127).to(torch.int8)
        for name in scales:
            scales[name] = torch.rand(blocks, block_size, kv_heads, generator=generator).masked_fill_(
                ~is_used.unsqueeze(-1), float("nan")
            ) / 40  # fmt: skip
    else:
        buffer[~is_used] = float("nan")
    key_cache = buffer[..., : kv_heads * head_dim].unflatten(-1, (kv_heads, head_dim))
    value_cache = buffer[..., kv_heads * head_dim :].unflatten(-1, (kv_heads, value_dim))
    if not is_joint:
        key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()
    # Queries as a slice of a projection that makes keys and values too.
    query = torch.randn(sum(query_lens), (heads + 1) * head_dim, generator=generator).to(dtype)
    cu_seqlens = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    options: dict[str, Any] = {
        **scales, "scale": head_dim**-0.5, "max_query_len": max(query_lens), "max_context_len": max(context_lens),
    }  # fmt: skip
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    heads_of = query[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
    return (heads_of, key_cache, value_cache, tables, cu_seqlens, lengths), options


def torch_attention(case: Case, sliding_window: int | None) -> Tensor:
    """The same by scaled_dot_product_attention, one sequence after the other, with a mask written out."""
    (query, key_cache, value_cache, tables, cu_seqlens, lengths), options = case
    outputs = []
    for index, length in enumerate(lengths.tolist()):
        rows = query[cu_seqlens[index] : cu_seqlens[index + 1]]
        slots = [(int(tables[index, p // key_cache.shape[1]]), p % key_cache.shape[1]) for p in range(length)]
        keys = torch.stack([key_cache[slot] for slot in slots], dim=1)
        values = torch.stack([value_cache[slot] for slot in slots], dim=1)
        mask = torch.tensor([
            [p <= length - len(rows) + i and (sliding_window is None or p > length - len(rows) + i - sliding_window)
             for p in range(length)]
            for i in range(len(rows))
        ])  # fmt: skip
        output = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None], keys[None], values[None], mask, scale=options["scale"], enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("sliding_window", [None, 1, 7])
def test_the_reference_is_torchs_attention(assert_near: AssertNear, sliding_window: int | None) -> None:
    case = make_case([5, 1, 16], [5, 9, 40], 6, 2, 16, 24, 8, is_joint=True)
    actual = reference.paged_attention(*case[0], **case[1], sliding_window=sliding_window)
    assert_near(actual, torch_attention(case, sliding_window))


def test_the_reference_caps_scores_and_scales_codes() -> None:
    arguments, options = make_case([3], [3], 1, 1, 8, 8, 8, is_int8=True)
    query, key_cache, value_cache, tables, _, _ = arguments
    block = int(tables[0, 0])
    keys = key_cache[block, :3, 0].double() * options["key_scale"][block, :3].double()
    values = value_cache[block, :3, 0].double() * options["value_scale"][block, :3].double()
    scores = 0.5 * torch.tanh(query[2, 0].double() @ keys.T * options["scale"] / 0.5)
    wanted = torch.exp(scores) / torch.exp(scores).sum() @ values
    actual = reference.paged_attention(*arguments, **options, softcap=0.5)
    torch.testing.assert_close(actual[2, 0].double(), wanted, rtol=1e-5, atol=1e-6)


SHAPES: dict[str, tuple[Any, ...]] = {
    "decode at the edges of blocks and tiles": ([1] * 6, [1, 7, 8, 31, 32, 33], 3, 1, 16, 16, 8),
    "decode, padding of a batch": ([1, 1, 1], [5, 0, 33], 2, 1, 16, 16, 16),
    "decode, uneven heads": ([1, 1], [5, 70], 6, 2, 24, 40, 8),
    "few queries each": ([3, 0, 2], [40, 9, 2], 2, 1, 8, 8, 32),
    "prefill of 63 and others": ([63, 1, 0, 3], [63, 33, 0, 33], 3, 1, 16, 16, 16),
    "prefill behind a context": ([17], [65], 5, 1, 32, 16, 128),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 17},
    "softcap": {"softcap": 1.5},
    "window, 3 parts": {"sliding_window": 40, "num_splits": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_the_reference(
    assert_near: AssertNear, triton_attention: Callable[..., Tensor], shape: str
) -> None:
    arguments, options = make_case(*SHAPES[shape])
    assert_near(triton_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


@pytest.mark.parametrize(
    ("shape", "option"),
    [
        ("decode at the edges of blocks and tiles", "window"),
        ("prefill of 63 and others", "window"),
        ("few queries each", "softcap"),
        ("prefill behind a context", "window, 3 parts"),
        ("decode, uneven heads", "window, 3 parts"),
    ],
)
def test_windows_caps_and_parts(
    assert_near: AssertNear, triton_attention: Callable[..., Tensor], shape: str, option: str
) -> None:
    arguments, options = make_case(*SHAPES[shape])
    options |= OPTIONS[option]
    assert_near(triton_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


NATIVE_SHAPES = SHAPES | {
    "several parts": ([1, 1, 2, 3], [256, 257, 600, 900], 3, 1, 64, 64, 32),
    "blocks of 5": ([1, 4], [23, 300], 14, 2, 8, 16, 5),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", NATIVE_SHAPES)
def test_the_compiled_body_equals_the_reference(
    assert_near: AssertNear, native_attention: Callable[..., Tensor], shape: str, option: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("quantkit_kernels.reference.attention.BLOCK_SIZES", (5, *reference.attention.BLOCK_SIZES))
    arguments, options = make_case(*NATIVE_SHAPES[shape], is_joint=shape.startswith("several"))
    options |= OPTIONS[option]
    assert_near(native_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_wide", [False, True])
def test_the_compiled_body_on_short_types_and_codes(
    assert_near: AssertNear, native_attention: Callable[..., Tensor], is_wide: bool, dtype: torch.dtype, is_int8: bool
) -> None:
    arguments, options = make_case([40, 1], [70, 333], 4, 2, 16, 16, 16, dtype, is_int8=is_int8, is_joint=True)
    if is_wide:
        arguments = (arguments[0].float(), *arguments[1:])
    assert_near(native_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


def test_the_compiled_body_gives_the_same_bits_in_any_batch_and_with_any_threads(
    native_attention: Callable[..., Tensor],
) -> None:
    arguments, options = make_case([1, 1, 1], [20, 960, 400], 6, 2, 16, 16, 8)
    query, key_cache, value_cache, tables, _, lengths = arguments
    together = native_attention(*arguments, **options)
    before = torch.get_num_threads()
    try:
        for threads, index in itertools.product((1, 3), range(3)):
            torch.set_num_threads(threads)
            one = slice(index, index + 1)
            options["max_context_len"] = int(lengths[index])
            cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
            alone = native_attention(
                query[one], key_cache, value_cache, tables[one], cu_seqlens, lengths[one], **options
            )
            assert torch.equal(alone[0], together[index])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["cu_seqlens", "context_lens", "block_tables"])
def test_the_compiled_body_reads_nothing_outside(native_attention: Callable[..., Tensor], name: str) -> None:
    arguments, options = make_case([1, 2], [9, 20], 2, 1, 8, 8, 8)
    spoiled = arguments[{"block_tables": 3, "cu_seqlens": 4, "context_lens": 5}[name]]
    for number in (-1, 1000):
        kept, spoiled.flatten()[0] = int(spoiled.flatten()[0]), number
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 3, context_lens be 0 to 20, and"):
            native_attention(*arguments, **options)
        spoiled.flatten()[0] = kept
    assert native_attention(*arguments, **options).isfinite().all()
    arguments, options = make_case([2], [9], 4, 2, 16, 16, 8, is_int8=True)
    options["key_scale"] = options["key_scale"].repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(ValueError, match=r"key_scale has the strides \(32, 4, 1\), allowed is a contiguous tensor"):
        native_attention(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(("query_lens", "num_splits"), [([1, 1], 2), ([40, 1], None)])
def test_short_types_and_codes(
    assert_near: AssertNear, triton_attention: Callable[..., Tensor], dtype: torch.dtype, is_int8: bool,
    query_lens: list[int], num_splits: int | None,
) -> None:  # fmt: skip
    arguments, options = make_case(query_lens, [70, 33], 4, 2, 16, 16, 16, dtype, is_int8=is_int8, is_joint=True)
    options["num_splits"] = num_splits
    assert_near(triton_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


def test_a_sequence_has_the_same_bits_in_any_batch(
    assert_near: AssertNear, triton_attention: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit_kernels.paged_attention_plan.SPLIT_KEYS", 32)
    arguments, options = make_case([1, 1, 1], [20, 96, 40], 2, 1, 16, 16, 8)
    query, key_cache, value_cache, tables, _, lengths = arguments
    together = triton_attention(*arguments, **options)
    assert_near(together, reference.paged_attention(*arguments, **options))
    for index, length in enumerate(lengths.tolist()):  # alone there are fewer parts, for the first only one
        one = slice(index, index + 1)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        options["max_context_len"] = length
        alone = triton_attention(
            query[one], key_cache, value_cache, tables[one], cu_seqlens, lengths[one], **options
        )  # fmt: skip
        assert torch.equal(alone[0], together[index])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_scores_that_overflow_are_capped(assert_near: AssertNear, triton_attention: Callable[..., Tensor]) -> None:
    arguments, options = make_case([2], [9], 1, 1, 8, 8, 8)
    options |= {"softcap": 2.0, "scale": 1e4}
    assert_near(triton_attention(*arguments, **options), reference.paged_attention(*arguments, **options))


def test_without_queries_there_is_nothing_to_do(triton_attention: Callable[..., Tensor]) -> None:
    arguments, options = make_case([0], [9], 2, 1, 8, 8, 8)
    assert triton_attention(*arguments, **options).shape == (0, 2, 8)
    assert quantkit_kernels.paged_attention(*arguments, **options).shape == (0, 2, 8)


def test_the_plan_keeps_parts_and_tiles_to_their_sizes() -> None:
    assert split_plan(1, 4096, 4, None, 64, None) == (4096 // SPLIT_KEYS, SPLIT_KEYS)
    assert split_plan(1, 8, 4, None, 64, None) == (1, SPLIT_KEYS)  # the size of a part never depends on the length
    assert split_plan(512, 4096, 4, None, 64, None) == (1, 4096)
    assert split_plan(1, 100_000, 4, 1000, 64, None) == (3, SPLIT_KEYS)  # parts are counted from the window's start
    assert split_plan(1, 130, 4, None, 64, 2) == (2, 128)
    for group in (1, 3, 7, 71):
        for queries in (1, 4, 1000):
            chosen = configuration(queries, group, 128, 2, is_int8=False, ampere=False)
            assert chosen.block_m >= group
            assert not is_folded(queries, group) or chosen.block_m >= queries * group


def change(index: int, function: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor], dict[str, Any]], None]:
    def apply(arguments: list[Tensor], options: dict[str, Any]) -> None:
        arguments[index] = function(arguments[index])

    return apply


def option(name: str, value: Any) -> Callable[[list[Tensor], dict[str, Any]], None]:
    return lambda arguments, options: options.update({name: value})


@pytest.mark.parametrize("body", ["reference", "triton", "public"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(0, lambda t: t[0]), r"query is torch.float32 \[4, 16\], allowed is torch.float32 or .* \[T, H, D\]"),
        (change(0, lambda t: t.double()), r"query is torch.float64 .* allowed is torch.float32 or torch.bfloat16"),
        (change(0, lambda t: t[:, :3]), r"query has 3 heads, allowed is a multiple of the 2 of keys"),
        (change(0, lambda t: t[..., :8]), r"key_cache is .*, allowed is .* \[blocks, block_size, H_kv, 8\]"),
        (
            change(1, lambda t: t.bfloat16()),
            r"key_cache is torch.bfloat16, allowed is what value_cache is: torch.float",
        ),
        (change(1, lambda t: t.to(torch.int8)), r"key_scale is None and key_cache torch.int8, allowed is a scale for"),
        (change(2, lambda t: t[..., :12]), r"value_cache has head_dim=12, allowed is a multiple of 8 from 8 to 256"),
        (change(2, lambda t: t[:2]), r"value_cache is .*, allowed is .* \[\d+, 8, 2, D_v\]"),
        (change(3, lambda t: t.long()), r"block_tables is torch.int64 .* allowed is torch.int32 \[1, B\]"),
        (change(4, lambda t: t[:1]), r"cu_seqlens is torch.int32 \[1\], allowed is torch.int32 \[2\]"),
        (change(5, lambda t: t.to("meta")), r"context_lens is on meta, allowed is the device of the first"),
        (option("value_scale", torch.ones(1)), r"value_scale is given and value_cache torch.float32, allowed is"),
        (option("sliding_window", 0), r"sliding_window=0, allowed is None or a number above 0"),
        (option("softcap", -1.0), r"softcap=-1.0, allowed is None or a number above 0"),
        (option("num_splits", 0), r"num_splits=0, allowed is None or a number above 0"),
        (option("max_context_len", 1000), r"max_context_len=1000, allowed is .* 0 to 24, the room of block_tables"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    triton_attention: Callable[..., Tensor], body: str, spoil: Callable[[list[Tensor], dict[str, Any]], None],
    message: str,
) -> None:  # fmt: skip
    bodies = {"reference": reference.paged_attention, "public": quantkit_kernels.paged_attention}
    arguments, options = make_case([1], [9], 4, 2, 16, 16, 8)
    changed = list(arguments)
    spoil(changed, options)
    with pytest.raises(ValueError, match=message):
        bodies.get(body, triton_attention)(*changed, **options)


def test_block_sizes_other_than_powers_of_two_are_refused() -> None:
    arguments, options = make_case([1], [9], 4, 2, 16, 16, 12)
    with pytest.raises(ValueError, match="block_size=12, allowed is one of 8, 16, 32, 64, 128"):
        reference.paged_attention(*arguments, **options)


def test_the_launcher_refuses_what_the_kernel_cannot_read(triton_attention: Callable[..., Tensor]) -> None:
    arguments, options = make_case([2], [9], 4, 2, 16, 16, 8)
    query = torch.zeros(2, 4 * 16 + 1)[:, : 4 * 16].unflatten(-1, (4, 16))
    with pytest.raises(ValueError, match=r"query has the strides \(65, 16, 1\), allowed are multiples of 8"):
        triton_attention(query, *arguments[1:], **options)
    shifted = torch.zeros(2 * 4 * 16 + 1)[1:].view(2, 4, 16)
    with pytest.raises(ValueError, match=r"query begins at 0x[0-9a-f]+, allowed is a multiple of 16"):
        triton_attention(shifted, *arguments[1:], **options)
    arguments, options = make_case([2], [9], 4, 2, 16, 16, 8, is_int8=True)
    options["key_scale"] = options["key_scale"].repeat_interleave(2, dim=1)[:, ::2]
    with pytest.raises(ValueError, match=r"key_scale has the strides .*, allowed is a contiguous tensor"):
        triton_attention(*arguments, **options)


def test_lengths_that_do_not_fit_are_refused_on_the_cpu() -> None:
    arguments, options = make_case([1, 2], [9, 20], 2, 1, 8, 8, 8)
    with pytest.raises(ValueError, match="context_lens holds a length of 20, allowed is 0 to 19"):
        reference.paged_attention(*arguments, **(options | {"max_context_len": 19}))
    with pytest.raises(ValueError, match="cu_seqlens holds a length of 2, allowed is 0 to 1"):
        reference.paged_attention(*arguments, **(options | {"max_query_len": 1}))
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 3, allowed is 0 to 2"):
        reference.paged_attention(arguments[0][:2], *arguments[1:], **options)


def test_constants_follow_the_strides_of_the_caches() -> None:
    (query, key_cache, value_cache, *_), _ = make_case([1], [9], 4, 2, 16, 24, 8, is_joint=True)
    chosen = configuration(1, 2, 24, 4, is_int8=False, ampere=False)
    found = kernel_constants(query.shape[1], key_cache, value_cache, None, None, 1, chosen)
    assert found["STRIDES"] == (8 * 80, 80, 8 * 80, 80, 16, 2)
    assert found["HEAD_STRIDES"] == (16, 24)
    assert (found["BLOCK_D"], found["BLOCK_DV"]) == (16, 32)
