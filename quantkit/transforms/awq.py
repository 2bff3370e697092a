"""AWQ: scale up the weight columns whose inputs are large, so that rounding hurts them less."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures import Fold
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.primitives import choose_qparams, dequantize, quantize
from quantkit.scheme import QuantScheme
from quantkit.transforms.folding import FoldScale, num_channels, to_channels, to_columns

WANTED = Wanted(gram=True, columns=True)
_TRIAL_ROWS = 512  # of each layer; rows are quantized independently
CLIP_FRACTIONS = tuple(1 - step / 20 for step in range(10))  # of the group's largest weight
_UNCLIPPED = ("q_proj", "k_proj", "qkv_proj")  # attention logits multiply two of them; clipping is known to hurt


@dataclass(frozen=True, slots=True)
class Options:
    """Options of AWQ.

    Attributes:
        num_ratios: exponents between 0 (no change) and 1 that are tried.
        clip: also search, for each group, how far to clip the weights. For RTN without a search; GPTQ and RTN with one
            choose their own clips.
    """

    num_ratios: int = 10
    clip: bool = False

    def __post_init__(self) -> None:
        if self.num_ratios < 1:
            raise TypeError(f"num_ratios={self.num_ratios} is not positive")


def search(
    fold: Fold,
    block: nn.Module,
    schemes: Mapping[str, QuantScheme],
    statistics: InputStatistics,
    options: Options,
    dtype: torch.dtype,
) -> FoldScale:
    """The scale with the least error of the consumers' outputs after rounding to nearest.

        s = mean|x|^r  or  mean|x|^r / mean|w|^(1-r),  error = tr(D H D^T),  D = Q(W s) / s - W

    The second moment H of the inputs gives the error of all calibration tokens without another forward pass.

    Args:
        fold: its consumers are searched together.
        block: in float32; not modified.
        schemes: by layer name in the block.
        statistics: of the consumers' inputs.
        options: of AWQ.
        dtype: in which scales are stored.

    Source: arXiv:2306.00978, section 3.2, and AutoAWQ's two forms of the scale. Deviation: the error is that of the
    linear layers' outputs, not of the module around them.
    """
    weights = {name: _some_rows(block.get_submodule(name)) for name in fold.consumers}
    hessian = statistics.hessian().float()
    size = to_channels(fold, block, statistics.mean_abs, largest=False).clamp(min=1e-4)
    magnitude = torch.cat([_normalized(weight, schemes[name]) for name, weight in weights.items()]).mean(0)
    magnitude = to_channels(fold, block, magnitude, largest=False)
    best = torch.ones(num_channels(fold, block))
    errors: dict[str, float] = {}
    least = float("inf")
    trials = [(0.0, False)]
    trials += [((i + 1) / options.num_ratios, duo) for i in range(options.num_ratios) for duo in (False, True)]
    for ratio, duo in trials:
        scale = size.pow(ratio) if ratio else torch.ones_like(size)
        if duo:
            scale = scale / (magnitude.pow(1 - ratio) + 1e-4)
        scale = scale.clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        columns = to_columns(fold, block, scale)
        error = 0.0
        for name, weight in weights.items():
            difference = _rounded(weight * columns, schemes[name], dtype) / columns - weight
            error += float(((difference @ hessian) * difference).sum())
        errors[f"{ratio:g}{' duo' if duo else ''}"] = error
        if error < least:
            best, least, chosen = scale, error, f"{ratio:g}{' duo' if duo else ''}"
    gain = least / errors["0"] if errors["0"] > 0 else 1.0
    return FoldScale(best, {"ratio": chosen, "error_ratio": gain})


def clip(
    fold: Fold,
    block: nn.Module,
    schemes: Mapping[str, QuantScheme],
    statistics: InputStatistics,
    scale: Tensor,
    options: Options,
) -> None:
    """Clip each group of the consumers' weights at the fraction of its range with the least output error of the group.

    Args:
        fold: already applied.
        block: in float32; its consumers' weights are replaced.
        schemes: by layer name in the block.
        statistics: of the inputs before the fold.
        scale: [P] that the fold applied.
        options: of AWQ; nothing happens without ``clip``.
    """
    if not options.clip:
        return
    inverse = 1 / to_columns(fold, block, scale)
    hessian = statistics.hessian().float() * inverse * inverse.unsqueeze(1)
    for name in fold.consumers:
        if name.rpartition(".")[2] in _UNCLIPPED:
            continue
        consumer, scheme = block.get_submodule(name), schemes[name]
        assert isinstance(consumer, nn.Linear)
        weight = consumer.weight.detach()
        groups = scheme.num_groups(weight.shape[1])
        grouped = weight.reshape(weight.shape[0], groups, -1)
        width = grouped.shape[-1]
        blocks = torch.stack([hessian[g * width : (g + 1) * width, g * width : (g + 1) * width] for g in range(groups)])
        best, least = grouped, torch.full(grouped.shape[:2], float("inf"))
        for fraction in CLIP_FRACTIONS:
            low, high = grouped.amin(-1, keepdim=True) * fraction, grouped.amax(-1, keepdim=True) * fraction
            if scheme.symmetric:
                high = torch.maximum(high, -low)
                low = -high
            clipped = torch.minimum(torch.maximum(grouped, low), high)
            difference = _rounded(clipped.reshape(weight.shape), scheme, torch.float32).reshape(grouped.shape) - grouped
            error = (torch.bmm(difference.transpose(0, 1), blocks).transpose(0, 1) * difference).sum(-1)
            best = torch.where((error < least).unsqueeze(-1), clipped, best)
            least = torch.minimum(error, least)
        consumer.weight = nn.Parameter(best.reshape(weight.shape).contiguous(), requires_grad=False)


def _some_rows(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()[:: -(-weight.shape[0] // _TRIAL_ROWS)]


def _normalized(weight: Tensor, scheme: QuantScheme) -> Tensor:
    """[N, K] magnitudes as fractions of the largest of their group."""
    groups = weight.abs().reshape(weight.shape[0], scheme.num_groups(weight.shape[1]), -1)
    return (groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)).reshape(weight.shape)


def _rounded(weight: Tensor, scheme: QuantScheme, dtype: torch.dtype) -> Tensor:
    """Quantized to nearest and back."""
    scale, zero_point = choose_qparams(weight, scheme, dtype)
    return dequantize(quantize(weight, scale, scheme, zero_point), scale, zero_point)
