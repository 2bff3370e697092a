"""What the inputs of a layer are in the original model, beside what they become after all that is quantized before."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

PAIR_TOKENS = 1024  # tokens of each source kept in both streams, to judge by
_PER_BATCH = 128  # of these, at most so many from one batch of windows


@dataclass(slots=True)
class OriginalStream:
    """Running statistics of pairs of inputs: x of the quantized model, o of the original one, for the same token.

    Attributes:
        in_features: K.
        device: where all is kept.
        num_tokens: pairs added so far, those of held-out windows among them.
        num_held_out: pairs of held-out windows.
    """

    in_features: int
    device: torch.device
    num_tokens: int = 0
    num_held_out: int = 0
    _cross: Tensor = field(init=False)
    _held_out_cross: Tensor = field(init=False)
    _pairs: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cross = torch.zeros(self.in_features, self.in_features, device=self.device)
        self._held_out_cross = torch.zeros_like(self._cross)

    def add(self, x: Tensor, original: Tensor, held_out: Tensor | None, source: Tensor | None) -> None:
        """Count pairs of inputs.

        Args:
            x: [M, K] float32.
            original: [M, K] floating, of the same tokens.
            held_out: [M] bool, True for tokens of windows that only judge; None for none.
            source: [M] int64, the number of the calibration source of each token; None for one source.
        """
        original = original.float()
        self.num_tokens += x.shape[0]
        if held_out is None or not bool(held_out.any()):
            self._cross.addmm_((original - x).T, x)
            return
        fit, judges = ~held_out, held_out
        self._cross.addmm_((original[fit] - x[fit]).T, x[fit])
        x, original = x[judges], original[judges]
        self.num_held_out += x.shape[0]
        self._held_out_cross.addmm_((original - x).T, x)
        numbers = torch.zeros(len(x), dtype=torch.int64) if source is None else source[judges]
        for number in numbers.unique().tolist():
            own = (numbers == number).nonzero().squeeze(1)
            own = own[:: -(-len(own) // _PER_BATCH)]
            self._pairs.setdefault(number, []).append((x[own], original[own]))

    def cross(self) -> Tensor:
        """[K, K] float64 mean of (o - x) x^T over all tokens."""
        return (self._cross.double() + self._held_out_cross.double()).div_(max(self.num_tokens, 1))

    def fit_cross(self) -> Tensor:
        """The same over the tokens that are not held out."""
        return self._cross.double().div_(max(self.num_tokens - self.num_held_out, 1))

    def pairs(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Number of a source -> x and o, both [P, K] float32: held-out tokens, evenly taken; P <= PAIR_TOKENS.

        A source of which no window is held out is missing.
        """
        found = {}
        for number, parts in sorted(self._pairs.items()):
            x, original = (torch.cat(side) for side in zip(*parts, strict=True))
            step = -(-len(x) // PAIR_TOKENS)
            found[number] = (x[::step], original[::step])
        return found
