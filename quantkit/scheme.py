"""How the weights of a layer are stored: bits, groups, symmetry; and the presets that users name in a recipe."""

from dataclasses import dataclass, replace

GROUP_SIZES = (128, 64, 32)  # what the kernels of the readers accept; ``auto`` takes the largest that divides
PER_CHANNEL = -1  # group_size of one scale per output row


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Integer weights with one scale per group of input columns; activations stay in 16 bits.

    Attributes:
        num_bits: bits of a code. Codes are signed, in [-2**(num_bits - 1), 2**(num_bits - 1) - 1].
        group_size: input columns that share a scale; -1 is one scale per output row.
        symmetric: True if zero is code 0 (no zero point is stored).
    """

    num_bits: int = 4
    group_size: int = 128
    symmetric: bool = True

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
        return f"W{self.num_bits}A16 {group} {'symmetric' if self.symmetric else 'asymmetric'}"


PRESETS: dict[str, QuantScheme] = {
    "W4A16": QuantScheme(num_bits=4, group_size=128, symmetric=True),
}
