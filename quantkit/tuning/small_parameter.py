"""Norms' weights and biases: parameters that cost no bits and are tuned along with the scales."""

import torch
from torch import Tensor, nn


def small_parameters(model: nn.Module) -> list[str]:
    """Names of the vectors among a model's parameters."""
    return [name for name, value in model.named_parameters() if value.dim() == 1]


class SmallParameter(nn.Module):
    """A vector as it would be stored, and how far it has moved.

    Args:
        start: the parameter in float32.
        dtype: storage dtype, in which the model always sees it.

    Attributes:
        shift: change in units of the root mean square of the start.
    """

    def __init__(self, start: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.start, self.dtype = start.detach().clone(), dtype
        self.unit = float(self.start.square().mean().sqrt()) or 1.0
        self.shift = nn.Parameter(torch.zeros_like(self.start))

    def forward(self) -> Tensor:
        """The present value; rounding does not stop the gradient."""
        value = self.start + self.unit * self.shift
        return value + (value.detach().to(self.dtype).float() - value.detach())
