"""store_kv_cache: new keys and values into the paged cache."""

import torch
from torch import Tensor

from quantkit_kernels.reference.arguments import check_argument
from quantkit_kernels.reference.matmul import quantize_input

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Raise ValueError, with the allowed values, unless the arguments of `store_kv_cache` fit together."""
    for name, tensor, cache, scale in (
        ("key", key, key_cache, key_scale),
        ("value", value, value_cache, value_scale),
    ):
        if tensor.dim() != 3:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, allowed is 3: [tokens, kv_heads, head_dim]")
        if cache.dim() != 4:
            raise ValueError(
                f"{name}_cache has {cache.dim()} dimensions, allowed is 4: [blocks, kv_block_size, kv_heads, head_dim]"
            )
        if cache.shape[2:] != tensor.shape[1:]:
            raise ValueError(
                f"{name}_cache ends in {list(cache.shape[2:])}, "
                f"allowed is what {name} has: {list(tensor.shape[1:])} (kv_heads, head_dim)"
            )
        if tensor.dtype not in CACHE_DTYPES or cache.dtype not in (tensor.dtype, torch.int8):
            raise ValueError(
                f"{name} is {tensor.dtype} and {name}_cache {cache.dtype}, allowed is the same for both, "
                f"one of {', '.join(map(str, CACHE_DTYPES))}, or torch.int8 for the cache"
            )
        if tensor.stride(-1) != 1 or cache.stride(-1) != 1:
            raise ValueError(f"{name} and {name}_cache have the strides {tensor.stride(-1)} and {cache.stride(-1)} "
                             "along head_dim, allowed is 1 for both")  # fmt: skip
        if (scale is not None) != (cache.dtype == torch.int8):
            has = "None" if scale is None else "given"
            raise ValueError(f"{name}_scale is {has} and {name}_cache {cache.dtype}, "
                             "allowed is a scale for torch.int8 only")  # fmt: skip
        if scale is not None:
            check_argument(f"{name}_scale", scale, (torch.float32,), tuple(cache.shape[:3]), key.device)
    if value.shape[:2] != key.shape[:2] or value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)}, key_cache {list(key_cache.shape)} and value_cache "
            f"{list(value_cache.shape)} may differ in head_dim only"
        )
    if slot_mapping.shape != key.shape[:1] or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}, "
            f"allowed is torch.int64 [{key.shape[0]}], one slot a token"
        )
    if len({tensor.device for tensor in (key, value, key_cache, value_cache, slot_mapping)}) > 1:
        raise ValueError(f"key is on {key.device}, allowed is one device for all five tensors")


def store_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the paged cache, in place.

        cache[slot // kv_block_size, slot % kv_block_size] = token's key (value);  slot -1 is padding and is skipped
        int8 caches: scale = max|x| / 127 of each token and head, 1 for zeros;  code = round(x / scale), half to even

    Args:
        key: [T, H_kv, D], unit stride along D, float32, bfloat16 or float16.
        value: [T, H_kv, D_v], same dtype; D_v may differ from D.
        key_cache: [blocks, kv_block_size, H_kv, D], dtype of key or int8; other slots stay as they are.
        value_cache: [blocks, kv_block_size, H_kv, D_v], likewise.
        slot_mapping: [T] int64, each -1 or in [0, blocks * kv_block_size); slots other than -1 are distinct.
        key_scale: [blocks, kv_block_size, H_kv] float32 for an int8 key_cache, written likewise; None for others.
        value_scale: the same for value_cache.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
        IndexError: a slot outside the cache (a kernel on a device does not check this).
    """
    check_store_kv_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    slots = slot_mapping
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    for tensor, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        codes = tensor
        if scale is not None:
            codes, scales = quantize_input(tensor)
            _write(scale, slots, scales.squeeze(-1))
        _write(cache, slots, codes.to(cache.dtype))


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows into the slots of [blocks, kv_block_size, ...]."""
    flat = cache.flatten(0, 1)
    if flat.data_ptr() == cache.data_ptr():
        flat.index_copy_(0, slots, rows)
    else:
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
