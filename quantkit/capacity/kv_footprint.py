"""Bytes of the KV cache: by layer, dtype, block and engine."""

import math
from dataclasses import dataclass

from quantkit.capacity.model_facts import KVLayer, ModelFacts
from quantkit.errors import UsageError

INT8_SCALE_BYTES = 4  # a float32 for each token and head, of the key and of the value
STATE_BYTES = 2  # of a number of a fixed state


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How keys and values are stored.

    Attributes:
        name: as tables show it.
        num_bytes: of a number.
        scale_bytes: beside each head's key and each head's value of a token.
        vllm: value of vLLM's ``--kv-cache-dtype``; None if it has none.
    """

    name: str
    num_bytes: int
    scale_bytes: int = 0
    vllm: str | None = None


KV_DTYPES = {
    "16-bit": KVDtype("16-bit", 2, vllm="auto"),
    "fp8": KVDtype("fp8", 1, vllm="fp8"),
    "int8": KVDtype("int8", 1, INT8_SCALE_BYTES, vllm="int8_per_token_head"),
}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How an engine lays out its cache.

    Attributes:
        name: of the engine.
        block_size: tokens in a block.
        frees_windows: blocks that no window sees any more are given back.
        holds_latents: MLA keeps the latent; otherwise the keys and values computed from it.
    """

    name: str
    block_size: int
    frees_windows: bool
    holds_latents: bool


LAYOUTS = {
    "vllm": CacheLayout("vLLM", 16, frees_windows=True, holds_latents=True),
    "quantkit": CacheLayout("quantkit", 32, frees_windows=False, holds_latents=False),
}
VLLM, QUANTKIT = LAYOUTS["vllm"], LAYOUTS["quantkit"]


def kv_dtype_named(name: str) -> KVDtype:
    """A dtype by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in KV_DTYPES:
        raise UsageError(f"the KV cache dtype {name!r} is unknown", fix=f"choose from {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def layer_token_bytes(layer: KVLayer, dtype: KVDtype, layout: CacheLayout, tp: int = 1) -> int:
    """Bytes of a token in one layer on each of ``tp`` devices; heads are split, a latent is on all of them."""
    if layer.kind == "latent":
        if not layout.holds_latents and layer.expanded_width is not None:
            return math.ceil(layer.expanded_width / tp) * dtype.num_bytes
        return layer.width * dtype.num_bytes + dtype.scale_bytes
    heads = math.ceil(layer.heads / tp)
    return heads * ((layer.key_dim + layer.value_dim) * dtype.num_bytes + 2 * dtype.scale_bytes)


def token_bytes(facts: ModelFacts, dtype: KVDtype, layout: CacheLayout = VLLM, tp: int = 1) -> int:
    """Bytes of a token over all layers, windows not counted: 2 x bytes x layers x kv_heads x head_dim."""
    return sum(layer_token_bytes(layer, dtype, layout, tp) for layer in facts.kv_layers)


def sequence_bytes(facts: ModelFacts, tokens: int, dtype: KVDtype, layout: CacheLayout = VLLM, tp: int = 1) -> int:
    """Bytes of a sequence, in whole blocks.

    Args:
        facts: the model.
        tokens: of the sequence, at least 1.
        dtype: of the cache.
        layout: the engine's.
        tp: devices that share the heads; the bytes are those of one.
    """
    blocks = math.ceil(tokens / layout.block_size)
    total = 0
    for layer in facts.kv_layers:
        held = blocks
        if layer.window is not None and layout.frees_windows:
            held = min(blocks, math.ceil(layer.window / layout.block_size) + 1)
        total += held * layout.block_size * layer_token_bytes(layer, dtype, layout, tp)
        total += layer.state_numbers * STATE_BYTES // tp
    return total


def read_bytes(facts: ModelFacts, tokens: float, dtype: KVDtype, layout: CacheLayout = VLLM, tp: int = 1) -> float:
    """Bytes that one decoded token reads of a sequence: a window reads no more than it sees."""
    return sum(
        min(tokens, layer.window or tokens) * layer_token_bytes(layer, dtype, layout, tp)
        + layer.state_numbers * STATE_BYTES / tp
        for layer in facts.kv_layers
    )


def waste(tokens: int, reserved: int) -> float:
    """Share of a reservation that ``tokens`` leave empty."""
    return 1 - tokens / reserved


def block_waste(tokens: int, block_size: int) -> float:
    """Share of a sequence's blocks that its tokens leave empty."""
    return waste(tokens, math.ceil(tokens / block_size) * block_size)
