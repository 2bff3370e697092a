"""How a layer is stored and multiplied: bits, groups, symmetry, what happens to its inputs; the presets of recipes."""

from dataclasses import dataclass, replace
from typing import Literal

GROUP_SIZES = (128, 64, 32)  # what the kernels of the readers accept; ``auto`` takes the largest that divides
PER_CHANNEL = -1  # group_size of one scale per output row


@dataclass(frozen=True, slots=True)
class InputScheme:
    """Symmetric 8-bit integers for the inputs of a layer.

    Attributes:
        dynamic: True for one scale per token, computed while the model runs; False for one scale per layer, found by
            calibration and stored in the checkpoint.
    """

    dynamic: bool = True

    @property
    def num_bits(self) -> int:
        """Bits of a code."""
        return 8

    @property
    def strategy(self) -> Literal["token", "tensor"]:
        """In the words of compressed-tensors."""
        return "token" if self.dynamic else "tensor"

    def __str__(self) -> str:
        return "dynamic per token" if self.dynamic else "static per tensor"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Integer weights with one scale per group of input columns.

    Attributes:
        num_bits: bits of a code. Codes are signed, in [-2**(num_bits - 1), 2**(num_bits - 1) - 1].
        group_size: input columns that share a scale; -1 is one scale per output row.
        symmetric: True if zero is code 0; False if each group stores the code that means zero (its zero point).
        input: how the layer's inputs are quantized; None if they stay in 16 bits.
    """

    num_bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    input: InputScheme | None = None

    @property
    def strategy(self) -> str:
        """``channel`` or ``group``, in the words of compressed-tensors."""
        return "channel" if self.group_size == PER_CHANNEL else "group"

    @property
    def code_min(self) -> int:
        """Smallest code."""
        return -(1 << (self.num_bits - 1))

    @property
    def code_max(self) -> int:
        """Largest code."""
        return (1 << (self.num_bits - 1)) - 1

    def num_groups(self, in_features: int) -> int:
        """Scales in a row of ``in_features`` columns.

        Raises:
            ValueError: group_size does not divide in_features.
        """
        if self.group_size == PER_CHANNEL:
            return 1
        if in_features % self.group_size:
            raise ValueError(f"in_features={in_features} is not a multiple of group_size={self.group_size}")
        return in_features // self.group_size

    def with_group_size(self, group_size: int) -> "QuantScheme":
        """The same scheme with another group size."""
        return replace(self, group_size=group_size)

    def __str__(self) -> str:
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        inputs = f", inputs {self.input}" if self.input else ""
        activation_bits = self.input.num_bits if self.input else 16
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"W{self.num_bits}A{activation_bits} {group} {symmetry}{inputs}"


PRESETS: dict[str, QuantScheme] = {
    "W4A16": QuantScheme(num_bits=4, group_size=128, symmetric=True),
    "W4A16_ASYM": QuantScheme(num_bits=4, group_size=128, symmetric=False),
    "W8A16": QuantScheme(num_bits=8, group_size=PER_CHANNEL, symmetric=True),
    "W8A8": QuantScheme(num_bits=8, group_size=PER_CHANNEL, symmetric=True, input=InputScheme(dynamic=True)),
    "W8A8_STATIC": QuantScheme(num_bits=8, group_size=PER_CHANNEL, symmetric=True, input=InputScheme(dynamic=False)),
}
