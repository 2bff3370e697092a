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
START = 0.5  # alpha from which `balance` begins
NORM = 12  # p of the norm that stands for a maximum in `balance`
STEPS, RATE = 200, 0.05  # of its descent, in logarithms of scales
REACH = 6.0  # scales stay within e^-6 and e^6, so that their twelfth powers are float32 numbers


@dataclass(frozen=True, slots=True)
class Options:
    """Options of SmoothQuant.

    Attributes:
        alpha: how much of the inputs' range goes into the weights, between 0 and 1; None for what `balance` finds.
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

        s = max|x|^alpha / max|w|^(1 - alpha),  error = sum over tokens of |Q(x / s) Q(W s)^T - x W^T|^2 / |x W^T|^2

    on a few hundred tokens. Candidates are what `balance` finds, the formula with alpha one half, and no change; or the
    formula alone, if the options give alpha. A token's error is a share of its output: the few tokens whose values are
    a thousand times larger would decide alone otherwise.

    Args:
        fold: its consumers are searched together.
        block: in float32; not modified.
        schemes: by layer name in the block.
        statistics: of the consumers' inputs.
        options: of SmoothQuant.
        dtype: in which scales are stored.

    Source: arXiv:2211.10438, equation 4, for the formula.
    """
    weights = {name: _weight(block.get_submodule(name)) for name in fold.consumers}
    reach = to_channels(fold, block, statistics.absmax, largest=True)
    largest = torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0)
    largest = to_channels(fold, block, largest, largest=True)
    alpha = START if options.alpha is None else options.alpha
    formula = reach.clamp(min=1e-5).pow(alpha) / largest.clamp(min=1e-5).pow(1 - alpha)
    formula = torch.where(reach > 0, formula, torch.ones_like(formula))
    formula = formula / formula.log().mean().exp()
    if options.alpha is not None:
        return FoldScale(formula, {"scale": f"alpha {alpha:g}"})
    x = statistics.sample
    targets = {layer: x @ weight.T for layer, weight in weights.items()}
    sizes = torch.stack([target.square().sum(1) for target in targets.values()]).sum(0)
    share = torch.where(sizes > 0, 1 / sizes, 0)
    candidates = {
        "unchanged": torch.ones(num_channels(fold, block)),
        f"alpha {START:g}": formula,
        "balanced": balance(fold, block, schemes, statistics, share, formula),
    }
    errors = {}
    for name, scale in candidates.items():
        columns = to_columns(fold, block, scale)
        errors[name] = 0.0
        for layer, weight in weights.items():
            outputs = _quantized_outputs(x, weight, columns, schemes[layer], statistics.absmax, dtype)
            errors[name] += float((outputs - targets[layer]).square().sum(1) @ share)
    chosen = min(errors, key=errors.__getitem__)
    before = errors["unchanged"]
    record = {"scale": chosen, "error_ratio": errors[chosen] / before if before > 0 else 1.0}
    return FoldScale(candidates[chosen], record)


def balance(
    fold: Fold,
    block: nn.Module,
    schemes: Mapping[str, QuantScheme],
    statistics: InputStatistics,
    share: Tensor,
    start: Tensor,
) -> Tensor:
    """[P] the scale for which rounding inputs and rounding weights cost least together, as noise of one step's size.

        inputs:   sum_t share_t max_k(|x_tk| / s_k)^2  sum_k s_k^2 sum_n w_nk^2  / steps^2
        weights:  sum_n max_k(|w_nk| s_k)^2  sum_k sum_t share_t x_tk^2 / s_k^2  / steps^2

    In log(s) each factor is a sum of exponentials of linear functions or a maximum of such, so the logarithm of the
    whole is convex: descent finds its least value. Maxima are taken as norms of order `NORM`, which makes a step a few
    products with a vector. Alpha ties a channel's scale to its single largest values; here a value counts only in a
    row or token whose step it sets.

    Args:
        fold: as in `search`.
        block: in float32; not modified.
        schemes: by layer name in the block.
        statistics: of the consumers' inputs.
        share: [S] the weight of each token of the sample.
        start: [P] the scale to begin from.
    """
    weights = [_weight(block.get_submodule(name)).abs() for name in fold.consumers]
    scheme = schemes[fold.consumers[0]]
    x = statistics.sample.abs()
    columns = share @ x.square()
    power = torch.stack([weight.square().sum(0) for weight in weights]).sum(0)
    rows, weight_powers = _powers(torch.cat(weights))
    rows = rows.square() / (scheme.code_max - scheme.code_min) ** 2
    tokens, input_powers = _powers(x if scheme.input is None or scheme.input.dynamic else statistics.absmax[None])
    tokens = tokens.square() * (share if len(tokens) == len(share) else share.sum())
    tokens = tokens * (0 if scheme.input is None else 1 / (2**scheme.input.num_bits - 1) ** 2)
    exponents = (start.log() - start.log().mean()).clamp(-REACH, REACH).requires_grad_()
    descent = torch.optim.Adam([exponents], lr=RATE)
    slowing = torch.optim.lr_scheduler.CosineAnnealingLR(descent, STEPS)
    with torch.enable_grad():
        for _ in range(STEPS):
            scale = to_columns(fold, block, exponents.clamp(-REACH, REACH).exp())
            of_inputs = (tokens @ (input_powers @ scale.pow(-NORM)).pow(2 / NORM)) * (scale.square() @ power)
            of_weights = (rows @ (weight_powers @ scale.pow(NORM)).pow(2 / NORM)) * (columns / scale.square()).sum()
            descent.zero_grad()
            (of_inputs + of_weights).log().backward()
            descent.step()
            slowing.step()
    exponents = exponents.detach().clamp(-REACH, REACH)
    return (exponents - exponents.mean()).exp()


def _powers(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R] the largest of each row of [R, K] magnitudes, and the rows as shares of it to the power of `NORM`."""
    largest = rows.amax(1).clamp(min=1e-12)
    return largest, (rows / largest[:, None]).pow(NORM)


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
