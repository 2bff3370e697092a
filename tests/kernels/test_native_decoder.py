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
            r"feed_forward_norm is torch.float32 \[32\], allowed is float32 \[24\]",
        ),
        ({"key_norm": torch.ones(8).half()}, r"key_norm is torch.float16 \[8\], allowed is float32 \[8\]"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeDecoder([make_layer(**changes)], **HEADS, **NUMBERS)


def test_heads_that_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="4 heads on 3 of 8 numbers are not compiled"):
        NativeDecoder([make_layer()], **(HEADS | {"num_kv_heads": 3}), **NUMBERS)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": random(2, 24).half()},
        {"x": random(2, 32)},
        {"turns": []},
        {"turns": [(torch.ones(2, 4), torch.zeros(2, 8))]},
        {"turns": [(torch.ones(2, 5), torch.zeros(2, 5))]},
        {"slot_mapping": torch.tensor([4, 8], dtype=torch.int32)},
        {"block_tables": torch.tensor([[1], [2]])},
        {"context_lens": torch.ones(3, dtype=torch.int32)},
        {"max_context_len": 5},
    ],
)
def test_a_step_that_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one of the step's tensors"):
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


def test_caches_that_do_not_fit() -> None:
    decoder = NativeDecoder([make_layer()], **HEADS, **NUMBERS)
    pair = (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
    with pytest.raises(ValueError, match=r"the cache of layer 0 is torch\.float32"):
        decoder(**make_step(cache=PagedCache([pair])))
    with pytest.raises(ValueError, match="0 caches for 1 layers"):
        decoder(**make_step(cache=PagedCache([])))
