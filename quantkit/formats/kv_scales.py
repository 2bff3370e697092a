"""Static scales of keys and values in a checkpoint, as compressed-tensors writes them: their names and their scheme.

An attention module A may have them for what it caches, announced by ``kv_cache_scheme`` in config.json:

    A.k_scale, A.v_scale  model dtype [1]  a key k is kept as k / k_scale in float8_e4m3fn

Source: compressed-tensors, quantization/lifecycle/initialize.py; vLLM, CompressedTensorsKVCacheMethod, which takes no
other scheme.
"""

from collections.abc import Iterable, Mapping
from typing import Any

KV_SCALES = ("k_scale", "v_scale")
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def is_kv_cache_scheme(args: Mapping[str, Any], silent: Iterable[str]) -> bool:
    """Whether a ``kv_cache_scheme`` is the one above; the keys ``silent`` may have any value."""
    known = all(args.get(key) == value for key, value in KV_CACHE_SCHEME.items())
    return known and all(value is None or key in (*KV_CACHE_SCHEME, *silent) for key, value in args.items())


def stored_kv_scales(tensors: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensors that are such scales."""
    return [name for name in tensors if name.rpartition(".")[2] in KV_SCALES]


def unused_kv_scales(tensors: Iterable[str]) -> tuple[str, ...]:
    """What our engine's record says of scales that a checkpoint brings; nothing if it brings none."""
    if not stored_kv_scales(tensors):
        return ()
    return ("stored k_scale and v_scale (fp8) are not used: an int8 cache finds its scales per token and head",)
