"""How large keys and values become in each attention layer, and the static scales that fit them into 8-bit floats."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.staged_block import BlockBatch
from quantkit.errors import QuantizationError

FP8_MAX = 448.0  # largest finite float8_e4m3fn
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")  # as transformers has called it, the newest first
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj")


@dataclass(slots=True)
class KeyValueRange:
    """Largest absolute key, after its position is rotated into it, and largest absolute value."""

    key: float = 0.0
    value: float = 0.0

    def scales(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """``k_scale`` and ``v_scale``, both [1] in ``dtype``: what is stored is key / k_scale in float8_e4m3fn.

        Raises:
            QuantizationError: nothing was seen, or it is not finite, or too small or large for ``dtype``.
        """
        made = {
            f"{name[0]}_scale": torch.tensor([getattr(self, name) / FP8_MAX]).to(dtype) for name in ("key", "value")
        }
        for name, scale in made.items():
            if not (torch.isfinite(scale).all() and (scale > 0).all()):
                raise QuantizationError(
                    f"{name} would be {float(scale):g} (largest key {self.key:g}, largest value {self.value:g})",
                    fix="Leave quantization.kv_cache out",
                )
        return made


class _Watcher:
    """Stands in for the cache of one batch of windows: notes what would be stored, and hands it on."""

    def __init__(self, found: KeyValueRange, token_mask: Tensor) -> None:
        self._found, self._mask = found, token_mask

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] of the batch's tokens."""
        for name, states in (("key", key), ("value", value)):
            counted = states.detach().transpose(1, 2)[self._mask.to(states.device)]
            largest = float(counted.abs().max()) if counted.numel() else 0.0
            setattr(self._found, name, max(getattr(self._found, name), largest))
        return key, value


@contextmanager
def observe_keys_and_values(batches: Sequence[BlockBatch], index: int) -> Iterator[KeyValueRange]:
    """While it is open, note the keys and values of block ``index`` in passes that begin. Masked tokens count nowhere.

    Raises:
        QuantizationError: the model passes no cache to its blocks.
    """
    found, before = KeyValueRange(), [batch.kwargs for batch in batches]
    name = next((name for name in CACHE_ARGUMENTS if name in before[0][index]), None)
    if name is None:
        raise QuantizationError(
            "the model passes no cache to its blocks, so its keys and values cannot be seen",
            fix="Leave quantization.kv_cache out",
        )
    try:
        for batch in batches:
            watched = {**batch.kwargs[index], name: _Watcher(found, batch.token_mask)}
            batch.kwargs = [*batch.kwargs[:index], watched, *batch.kwargs[index + 1 :]]
        yield found
    finally:
        for batch, unwatched in zip(batches, before, strict=True):
            batch.kwargs = unwatched


def attention_modules(module: nn.Module) -> list[str]:
    """Names of the modules that keep keys and values, by the rule of compressed-tensors.

    Source: compressed-tensors, quantization/lifecycle/initialize.py (is_cached_attention_module).
    """
    return [
        name
        for name, inner in module.named_modules()
        if "attention" in type(inner).__name__.lower()
        and any(hasattr(inner, projection) for projection in PROJECTIONS)
        and any(argument in inspect.signature(inner.forward).parameters for argument in CACHE_ARGUMENTS)
    ]
