"""How long a request may be and how many blocks the cache has."""

import torch

from quantkit.errors import EngineError, UsageError
from quantkit.serve.config import EngineConfig
from quantkit.serve.device import CPU, free_bytes
from quantkit.serve.kv_cache import KVCache, kv_block_bytes
from quantkit.serve.models.loader import LoadedModel

FREE_MEMORY_SHARE = 0.25  # of the host's free memory that a cache of unstated size may take
FREE_GPU_MEMORY_SHARE = 0.8  # likewise of a GPU's


def resolve_max_model_len(config: EngineConfig, loaded: LoadedModel) -> int:
    """Most tokens of a request: as configured, else as the model allows.

    Raises:
        UsageError: more than the model was made for.
    """
    if config.max_model_len is None:
        return loaded.max_model_len
    if config.max_model_len > loaded.max_model_len:
        raise UsageError(
            f"max_model_len={config.max_model_len} is more than the model's {loaded.max_model_len}",
            fix=f"Ask for at most {loaded.max_model_len} tokens, prompt and answer together",
        )
    return config.max_model_len


def make_cache(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> KVCache:
    """A cache as configured; else room for every running request at its longest, as far as memory goes.

    Raises:
        EngineError: not even one block beside the null block.
    """
    block_bytes = cache_block_bytes(config, loaded)
    if config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
        limit = f"kv_cache_bytes={config.kv_cache_bytes}"
    else:
        per_request = -(-max_model_len // config.kv_block_size)
        wanted = config.gpu_memory_utilization
        default = FREE_MEMORY_SHARE if loaded.device.type == "cpu" else FREE_GPU_MEMORY_SHARE
        fraction = default if wanted is None else wanted
        share = int(free_bytes(loaded.device) * fraction)
        num_blocks = min(config.max_num_seqs * per_request + 1, share // block_bytes)
        limit = f"{fraction:.0%} of the free memory ({share} bytes)"
    if num_blocks < 2:
        raise EngineError(
            f"{limit} holds {num_blocks} cache blocks of {block_bytes} bytes, at least 2 are needed",
            fix="raise kv_cache_bytes or lower kv_block_size",
        )
    return _cache(config, loaded, num_blocks, loaded.device)


def make_swap_space(config: EngineConfig, loaded: LoadedModel) -> KVCache | None:
    """Host memory for preempted requests; None if nothing is swapped.

    Raises:
        EngineError: it does not hold a block.
    """
    if not config.swap_space:
        return None
    block_bytes = cache_block_bytes(config, loaded)
    if config.swap_space < block_bytes:
        raise EngineError(
            f"swap_space={config.swap_space} does not hold one cache block of {block_bytes} bytes",
            fix="raise it or leave it at 0",
        )
    return _cache(config, loaded, config.swap_space // block_bytes, CPU)


def cache_block_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of one block over all layers."""
    return kv_block_bytes(loaded.shapes, config.kv_block_size, loaded.dtype, is_int8=config.kv_cache_dtype == "int8")


def _cache(config: EngineConfig, loaded: LoadedModel, num_blocks: int, device: torch.device) -> KVCache:
    is_int8 = config.kv_cache_dtype == "int8"
    return KVCache(loaded.shapes, num_blocks, config.kv_block_size, loaded.dtype, is_int8=is_int8, device=device)
