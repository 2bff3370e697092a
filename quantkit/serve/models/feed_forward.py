"""Feed-forward layers: one for all tokens, or many of which each token uses a few."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.serve.models.coded_rows import Rows
from quantkit.serve.models.projection import Projection

Gate = Callable[[Tensor], Rows]


class FeedForward:
    """down(activation(gate) * up).

    Args:
        gate_up: [T, 2F] from [T, K], gate first.
        gated: [T, F] from [T, 2F]; codes only if ``down`` takes them.
        down: [T, K] from [T, F].

    Attributes:
        gate_up: as given.
        down: as given.
        takes_codes: as `Projection.takes_codes`.
    """

    def __init__(self, gate_up: Projection, gated: Gate, down: Projection) -> None:
        self.gate_up, self._gated, self.down = gate_up, gated, down
        self.takes_codes = gate_up.takes_codes

    def __call__(self, x: Rows) -> Tensor:
        """[T, K] from [T, K]."""
        return self.down(self._gated(self.gate_up(x)))


class Experts:
    """Feed-forward layers, of which each token goes to the few that a router weighs highest.

    Args:
        router: [T, E] from [T, K].
        experts: E of them.
        num_per_token: to so many goes a token.
        normalizes: make the weights of a token's experts sum to 1.
        shared: a layer for all tokens beside the experts, and its gate, [T, 1] from [T, K]; None for none.

    Attributes:
        takes_codes: never; the router wants the rows themselves.
    """

    takes_codes = False

    def __init__(
        self,
        router: Projection,
        experts: Sequence[FeedForward],
        num_per_token: int,
        normalizes: bool,
        shared: tuple[FeedForward, Projection] | None = None,
    ) -> None:
        self._router, self._experts = router, experts
        self._num_per_token, self._normalizes, self._shared = num_per_token, normalizes, shared

    def __call__(self, x: Rows) -> Tensor:
        """[T, K] from [T, K]; each expert is asked once, with all its tokens."""
        assert isinstance(x, Tensor), "it takes no codes"
        weights, chosen = self._router(x).float().softmax(-1).topk(self._num_per_token, dim=-1)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # by expert, then by token
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        tokens = order // self._num_per_token
        rows = x[tokens].split(counts)
        products = [expert(own) for expert, own in zip(self._experts, rows, strict=True) if len(own)]
        weighted = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        weighted[order] = torch.cat(products)
        weighted = weighted.view(len(x), self._num_per_token, -1).mul_(weights.unsqueeze(-1))
        out = weighted.sum(1)
        if self._shared is not None:
            layer, gate = self._shared
            out += layer(x).mul_(gate(x).sigmoid_())
        return out
