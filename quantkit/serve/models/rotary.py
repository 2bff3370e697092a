"""Cosines and sines of a step's places, from a model's frequencies."""

from typing import Any

import torch
from torch import Tensor, nn


class RotaryFrequencies:
    """The frequencies of a model's layers.

    transformers works them out when it builds a model, for every kind of scaling that does not depend on how long a
    sequence is; they are taken from there.

    Args:
        module: transformers' rotary embedding.
        names: the sets of frequencies that the layers use; "" where the model has one.
        device: of the model.
    """

    def __init__(self, module: nn.Module, names: set[str], device: torch.device) -> None:
        self._sets: dict[str, tuple[Tensor, float]] = {}
        for name in sorted(names):
            prefix = f"{name}_" if name else ""
            frequencies: Any = getattr(module, f"{prefix}inv_freq")
            scaling: Any = getattr(module, f"{prefix}attention_scaling")
            self._sets[name] = frequencies.float().to(device), float(scaling)

    def at(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> cosines and sines, both [T, rot / 2] float32, of the places [T]."""
        found = {}
        for name, (frequencies, scaling) in self._sets.items():
            angles = positions.float().unsqueeze(1) * frequencies
            cos, sin = angles.cos(), angles.sin_()
            found[name] = (cos, sin) if scaling == 1 else (cos.mul_(scaling), sin.mul_(scaling))
        return found
