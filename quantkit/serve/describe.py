"""What an engine runs and how, for records."""

from typing import Any

import torch

from quantkit import __version__
from quantkit.formats.kv_scales import unused_kv_scales
from quantkit.serve.config import EngineConfig
from quantkit.serve.device import device_name
from quantkit.serve.kv_cache import KVCache
from quantkit.serve.models.loader import LoadedModel
from quantkit.source import ModelSource


def describe_engine(
    source: ModelSource,
    config: EngineConfig,
    loaded: LoadedModel,
    cache: KVCache,
    max_model_len: int,
    template_hash: str,
) -> dict[str, Any]:
    """JSON-able: the model, the engine's settings as they came out, and the hash of the chat template."""
    return {
        "model": {
            "name": source.name,
            "revision": source.revision,
            "checkpoint_hash": source.fingerprint(),
            "scheme": loaded.scheme,
            "weight_bytes": loaded.weight_bytes,
            "dequantized_from": source.file_bytes and {"file": source.name, "file_bytes": source.file_bytes},
        },
        "engine": {
            "name": "quantkit",
            "version": __version__,
            "device": device_name(loaded.device),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "stored_dtype": str(source.dtype).removeprefix("torch."),
            "max_model_len": max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "kv_block_size": config.kv_block_size,
            "num_kv_blocks": cache.num_blocks,
            "kv_cache_bytes": cache.nbytes,
            "kv_cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "swap_space": config.swap_space,
            "deterministic": config.deterministic,
            "seed": config.seed,
            "threads": torch.get_num_threads(),
            "kernels": [*loaded.kernels, *unused_kv_scales(source.tensors)],
        },
        "template_hash": template_hash,
    }
