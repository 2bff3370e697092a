"""What the compiled call of all layers refuses; its numbers are tested with the engine."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels.cpu_native_decoder import NativeDecoder, NativeLayer, PagedCache
from quantkit_kernels.cpu_native_linear import NativeHalf
from quantkit_kernels.native_library import native_blocker

pytestmark = pytest.mark.skipif(native_blocker() is not None, reason=str(native_blocker()))

HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
NUMBERS: dict[str, Any] = {"eps": 1e-5, "scale": 0.3, "softcap": None, "dtype": torch.bfloat16}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_layer(**changes: Any) -> NativeLayer:
    parts: dict[str, Any] = {
        "qkv": NativeHalf(random(64, 24)), "output": NativeHalf(random(24, 32)), "gate_up": NativeHalf(random(80, 24)),
        "down": NativeHalf(random(24, 40)), "attention_norm": torch.ones(24), "feed_forward_norm": torch.ones(24),
        "turns": 0,
    }  # fmt: skip
    return NativeLayer(**(parts | changes))


def make_step(**changes: Any) -> dict[str, Any]:
    cache = [(torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16))]
    step: dict[str, Any] = {
        "x": random(2, 24), "turns": [(torch.ones(2, 4), torch.zeros(2, 4))], "cache": PagedCache(cache),
        "slot_mapping": torch.tensor([4, 8]), "block_tables": torch.tensor([[1], [2]], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32), "context_lens": torch.ones(2, dtype=torch.int32),
        "max_context_len": 1,
    }  # fmt: skip
    return step | changes


def test_a_step_is_computed() -> None:
    step = make_step()
    decoder = NativeDecoder([make_layer()], **HEADS, **NUMBERS)
    assert decoder.seconds == (0, 0, 0)
    added, residual = decoder(**step)
    assert added is step["x"]
    assert all(seconds > 0 for seconds in decoder.seconds)
    assert added.isfinite().all()
    assert residual.shape == (2, 24)
    assert step["cache"].caches[0][0][1, 0].any()
    assert not step["cache"].caches[0][0][0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": NativeHalf(random(56, 24))}, r"qkv is \[56, 24\], allowed is \[64, 24\]"),
        ({"down": NativeHalf(random(24, 48))}, r"gate_up is \[80, 24\], allowed is \[96, 24\]"),
        (
            {"feed_forward_norm": torch.ones(32)},
            r"feed_forward_norm is torch.float32 \[32\], allowed is torch.float32 \[24\]",
        ),
        ({"key_norm": torch.ones(8).half()}, r"key_norm is torch.float16 \[8\], allowed is torch.float32 \[8\]"),
        ({"attention_norm": torch.ones(48)[::2]}, "attention_norm has the stride 2 along its last dimension"),
        ({"query_norm": torch.ones(1).expand(8)}, "query_norm has the stride 0 along its last dimension"),
        ({"attention_norm": torch.ones(24, device="meta")}, "attention_norm is on meta, allowed is cpu"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeDecoder([make_layer(**changes)], **HEADS, **NUMBERS)


def test_a_decoder_has_layers() -> None:
    with pytest.raises(ValueError, match="0 layers, allowed is 1 or more"):
        NativeDecoder([], **HEADS, **NUMBERS)


def test_a_decoder_keeps_its_weights() -> None:
    """Whatever becomes of the list that it was given, and of the weights' biases."""
    qkv = NativeHalf(random(64, 24), random(64))
    layers = [make_layer(qkv=qkv)]
    decoder = NativeDecoder(layers, **HEADS, **NUMBERS)
    wanted = decoder(**make_step())[0]
    other = qkv.with_bias(torch.full((64,), 100.0))
    layers[0] = make_layer(qkv=other)
    assert torch.equal(decoder(**make_step())[0], wanted)
    assert not torch.equal(NativeDecoder(layers, **HEADS, **NUMBERS)(**make_step())[0], wanted)


def test_heads_that_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="4 heads on 3 of 8 numbers are not compiled"):
        NativeDecoder([make_layer()], **(HEADS | {"num_kv_heads": 3}), **NUMBERS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": random(2, 24).half()}, r"x is torch.float16 \[2, 24\], allowed is torch.float32 \[T, 24\]"),
        ({"x": random(2, 32)}, r"x is torch.float32 \[2, 32\]"),
        ({"x": random(2, 25)[:, :24]}, r"x has the strides \(25, 1\), allowed is a contiguous tensor"),
        ({"x": random(2, 24).to("meta")}, "x is on meta, allowed is cpu"),
        ({"x": random(2, 24).requires_grad_()}, "x requires a gradient, which compiled bodies do not give"),
        ({"turns": []}, "0 turns, allowed is 1 or more"),
        ({"turns": [(torch.ones(2, 4), torch.zeros(2, 8))]}, r"sines of turn 0 is torch.float32 \[2, 8\], allowed is"),
        ({"turns": [(torch.ones(2, 5), torch.zeros(2, 5))]}, "turn 0 has 5 columns, allowed is up to 4"),
        ({"slot_mapping": torch.tensor([4, 8], dtype=torch.int32)}, "slot_mapping is torch.int32"),
        ({"block_tables": torch.tensor([[1], [2]])}, "block_tables is torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32, device="meta")}, "cu_seqlens is on meta"),
        ({"context_lens": torch.ones(3, dtype=torch.int32)}, r"context_lens is torch.int32 \[3\], allowed .* \[2\]"),
        ({"max_context_len": 5}, "max_context_len=5, allowed is 0 to 4, the room of block_tables"),
    ],
)
def test_a_step_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeDecoder([make_layer()], **HEADS, **NUMBERS)(**make_step(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_mapping", torch.tensor([4, 12])),
        ("context_lens", torch.tensor([1, 2], dtype=torch.int32)),
        ("block_tables", torch.tensor([[1], [3]], dtype=torch.int32)),
    ],
)
def test_places_outside_the_cache(name: str, value: Tensor) -> None:
    step = make_step(**{name: value})
    with pytest.raises(ValueError, match=r"slot_mapping must be -1 to 11, context_lens 0 to 1, and .* blocks below 3"):
        NativeDecoder([make_layer()], **HEADS, **NUMBERS)(**step)


def make_pair(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.zeros(3, 4, 2, 8, dtype=dtype), torch.zeros(3, 4, 2, 8, dtype=dtype)


SCALES = (torch.zeros(3, 4, 2), torch.zeros(3, 4, 2))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (PagedCache([]), "0 caches and 0 pairs of scales for 1 layers"),
        (PagedCache([make_pair()], [SCALES, SCALES]), "1 caches and 2 pairs of scales for 1 layers"),
        (
            PagedCache([make_pair(torch.float32)]),
            r"key cache of layer 0 is torch.float32 .*, allowed is torch.bfloat16 or torch.int8 \[3, 4, 2, 8\]",
        ),
        (PagedCache([(make_pair()[0], make_pair(torch.int8)[0])]), "value cache of layer 0 is torch.int8"),
        (PagedCache([make_pair(torch.int8)]), "key cache of layer 0 is torch.int8 without scales"),
        (PagedCache([make_pair()], [SCALES]), "key cache of layer 0 is torch.bfloat16 with scales"),
        (PagedCache([(make_pair()[0], make_pair()[1].to("meta"))]), "value cache of layer 0 is on meta"),
        (
            PagedCache([make_pair(torch.int8)], [(SCALES[0], torch.zeros(3, 4, 4)[..., ::2])]),
            "scale of the value cache of layer 0 has the stride 2",
        ),
    ],
)
def test_caches_that_do_not_fit(cache: PagedCache, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeDecoder([make_layer()], **HEADS, **NUMBERS)(**make_step(cache=cache))


@pytest.mark.parametrize(("dtype", "scales"), [(torch.float32, (None, None)), (torch.int8, SCALES)])
def test_a_cache_that_is_refused_changes_nothing(dtype: torch.dtype, scales: Any) -> None:
    """A step behind it writes into both layers of its own cache, and not into the first of the refused one."""
    decoder = NativeDecoder([make_layer(), make_layer()], **HEADS, **NUMBERS)
    good, bad = (
        PagedCache([make_pair(), make_pair()]),
        PagedCache([make_pair(), make_pair(dtype)], [(None, None), scales]),
    )
    decoder(**make_step(cache=good))
    for keys, values in good.caches:
        keys.zero_(), values.zero_()
    with pytest.raises(ValueError, match=f"key cache of layer 1 is {dtype}.*, allowed is torch.bfloat16 "):
        decoder(**make_step(cache=bad))
    decoder(**make_step(cache=good))
    assert all(part.any() for pair in good.caches for part in pair)
    assert not any(part.any() for pair in bad.caches for part in pair)
