"""What an algorithm needs to know of a layer's inputs: their second moment, the Hessian of the squared error."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

_TILE = 512  # columns of a tile of the symmetric product; smaller tiles skip more of the lower half but run slower


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add ``x.T @ x`` to the upper triangle (by tiles) of ``total``, in place.

    Only tiles on and above the diagonal are computed: for K = 1536 that is two thirds of the work of the full product.

    Args:
        total: [K, K] float32; tiles below the diagonal are left alone.
        x: [M, K] float32.
    """
    columns = x.shape[1]
    for start in range(0, columns, _TILE):
        stop = min(start + _TILE, columns)
        total[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])


@dataclass(slots=True)
class InputStatistics:
    """Running second moment of the inputs that one or more layers share.

    Attributes:
        in_features: K.
        num_tokens: tokens added so far; masked tokens do not count.
    """

    in_features: int
    num_tokens: int = 0
    _gram: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._gram = torch.zeros(self.in_features, self.in_features)

    def add(self, x: Tensor, token_mask: Tensor | None = None) -> None:
        """Count the tokens of ``x``.

        Args:
            x: [..., K] inputs of the layer.
            token_mask: [...] bool, False where a token is padding; None counts all.

        Raises:
            FloatingPointError: the inputs are not finite; the model overflows before this layer.
        """
        rows = x.reshape(-1, self.in_features)
        if token_mask is not None:
            rows = rows[token_mask.reshape(-1)]
        rows = rows.float()
        if not torch.isfinite(rows.sum()):
            raise FloatingPointError("the inputs contain NaN or infinity")
        add_gram(self._gram, rows)
        self.num_tokens += rows.shape[0]

    def hessian(self) -> Tensor:
        """[K, K] float64 symmetric mean of x x^T over the tokens; the literature's factor 2 cancels in every use."""
        upper = torch.triu(self._gram.double())
        full = upper + torch.triu(upper, 1).T
        return full / max(self.num_tokens, 1)
