"""The weight to aim at when a layer's inputs are not the original model's any more."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import QuantizationError


@dataclass(frozen=True, slots=True)
class TargetCorrection:
    """Options of the correction.

    Attributes:
        alpha: how far to go from the layer's own weight (0) to the one that answers the inputs it gets as the original
            answers its own (1).
        damping: lambda as a multiple of the Hessian's mean diagonal.
        skip: layers that keep their own weight as target: their name or its end, or a regular expression that matches
            all of it.
        apply: ``always``, or ``auto``: where on held-out windows of every source the quantized layer comes closer to
            the original's outputs with it than without.
    """

    alpha: float = 0.5
    damping: float = 1.0
    skip: tuple[str, ...] = ("down_proj",)
    apply: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise TypeError(f"target_correction.alpha={self.alpha} is outside [0, 1]")
        if not self.damping > 0:
            raise TypeError(f"target_correction.damping={self.damping} is not positive")
        if self.apply not in ("always", "auto"):
            raise TypeError(f"target_correction.apply={self.apply!r}; choose from always, auto")

    def covers(self, name: str) -> bool:
        """Whether the layer's target is corrected."""
        return self.alpha > 0 and not any(matches(pattern, name) for pattern in self.skip)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` is the layer's name, the end of it after a dot, or a regular expression for all of it."""
    return f".{name}".endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


def correct_target(weight: Tensor, hessian: Tensor, cross: Tensor, correction: TargetCorrection) -> Tensor:
    """The damped target, W + alpha W C inverse(H + lambda I).

    With alpha 1 and lambda 0 it is the least-squares answer to E |T x - W o|^2 for inputs x of the quantized model and
    o of the original one: T = W E[o x^T] inverse(E[x x^T]) = W (H + C) inverse(H).

    Args:
        weight: [N, K] float32, the original W.
        hessian: [K, K] float64, H = E[x x^T].
        cross: [K, K] float64, C = E[(o - x) x^T].
        correction: alpha, and lambda as a multiple of the mean diagonal of H.

    Returns:
        [N, K] float32.

    Raises:
        QuantizationError: H + lambda I cannot be factored.

    Source: arXiv:2504.09629 (QEP), its layer-wise correction.
    """
    ridge = correction.damping * float(hessian.diagonal().mean())
    if ridge == 0:  # no input at all
        return weight
    damped = hessian.clone()
    damped.diagonal().add_(ridge)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed or not torch.isfinite(lower).all():
        raise QuantizationError(
            f"the Hessian cannot be factored with target_correction.damping={correction.damping:g}", fix="Raise it"
        )
    own = weight.double()
    return (own + correction.alpha * torch.cholesky_solve((own @ cross).T, lower).T).float()


def original_error(weight: Tensor, quantized: Tensor, pair: tuple[Tensor, Tensor]) -> float:
    """|Q x - W o|^2 / |W o|^2: how far the quantized layer on its inputs is from the original one on the original's.

    Args:
        weight: [N, K] float32, the original W.
        quantized: [N, K] float32, Q.
        pair: x and o, both [P, K] float32.
    """
    x, original = pair
    wanted = original @ weight.T
    size = float(wanted.square().sum())
    return float((x @ quantized.T - wanted).square_().sum()) / size if size > 0 else 0.0
