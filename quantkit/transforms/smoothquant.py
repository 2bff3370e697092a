"""SmoothQuant: move outliers of a layer's inputs into its weights, so that 8-bit inputs lose less."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures import Fold
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.primitives import choose_qparams, dequantize, fake_quantize_input, quantize
from quantkit.scheme import QuantScheme
from quantkit.transforms.folding import FoldScale, num_channels, to_channels, to_columns

WANTED = Wanted(columns=True, sample=True)
ALPHAS = tuple(round(0.3 + 0.05 * step, 2) for step in range(14))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of SmoothQuant.

    Attributes:
        alpha: how much of the inputs' range goes into the weights, between 0 and 1; None for the one of each fold that
            loses least (no change among them).
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise TypeError(f"alpha={self.alpha} is outside [0, 1]")


def search(
    fold: Fold,
    block: nn.Module,
    schemes: Mapping[str, QuantScheme],
    statistics: InputStatistics,
    options: Options,
    dtype: torch.dtype,
) -> FoldScale:
    """The scale with the least error of the consumers' outputs when both inputs and weights are quantized.

        s = max|x|^alpha / max|w|^(1 - alpha),  error = |Q(x / s) Q(W s)^T - x W^T|^2  on a few hundred tokens

    Args:
        fold: its consumers are searched together.
        block: in float32; not modified.
        schemes: by layer name in the block.
        statistics: of the consumers' inputs.
        options: of SmoothQuant.
        dtype: in which scales are stored.

    Source: arXiv:2211.10438, equation 4; here alpha is searched for each fold.
    """
    weights = {name: _weight(block.get_submodule(name)) for name in fold.consumers}
    reach = to_channels(fold, block, statistics.absmax, largest=True)
    largest = torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0)
    largest = to_channels(fold, block, largest, largest=True)
    candidates: dict[str, Tensor] = {}
    if options.alpha is None:
        candidates["none"] = torch.ones(num_channels(fold, block))
    for alpha in ALPHAS if options.alpha is None else (options.alpha,):
        scale = reach.clamp(min=1e-5).pow(alpha) / largest.clamp(min=1e-5).pow(1 - alpha)
        scale = torch.where(reach > 0, scale, torch.ones_like(scale))
        candidates[f"{alpha:g}"] = scale / scale.log().mean().exp()
    if len(candidates) == 1:
        chosen = next(iter(candidates))
        return FoldScale(candidates[chosen], {"alpha": chosen})
    x = statistics.sample
    targets = {layer: x @ weight.T for layer, weight in weights.items()}
    errors = {}
    for name, scale in candidates.items():
        columns = to_columns(fold, block, scale)
        errors[name] = 0.0
        for layer, weight in weights.items():
            outputs = _quantized_outputs(x, weight, columns, schemes[layer], statistics.absmax, dtype)
            errors[name] += float((outputs - targets[layer]).square().sum())
    chosen = min(errors, key=errors.__getitem__)
    gain = errors[chosen] / errors["none"] if errors["none"] > 0 else 1.0
    return FoldScale(candidates[chosen], {"alpha": chosen, "error_ratio": gain})


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Linear)
    return module.weight.detach()


def _quantized_outputs(
    x: Tensor, weight: Tensor, columns: Tensor, scheme: QuantScheme, absmax: Tensor, dtype: torch.dtype
) -> Tensor:
    """[T, N] outputs of one layer on the sample, inputs and weights rescaled and quantized as the scheme has it."""
    scaled = weight * columns
    scale, zero_point = choose_qparams(scaled, scheme, dtype)
    rounded = dequantize(quantize(scaled, scale, scheme, zero_point), scale, zero_point)
    smooth = x / columns
    if scheme.input is not None:
        static = None if scheme.input.dynamic else ((absmax / columns).max() / 127.5).clamp(min=1e-12)
        smooth = fake_quantize_input(smooth, scheme.input, static)
    return smooth @ rounded.T
