"""Round to nearest: every weight to the nearest code, with the scale that the largest weight of its group asks for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.calibration.statistics import InputStatistics
from quantkit.primitives import QuantizedWeight, absmax_scale, quantize
from quantkit.scheme import QuantScheme

NEEDS_CALIBRATION = False


@dataclass(frozen=True, slots=True)
class Options:
    """RTN has no options."""


def rtn(
    weight: Tensor,
    statistics: InputStatistics | None,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
) -> Solution:
    """Quantize without looking at data.

    Args:
        weight: [N, K] float32.
        statistics: not used.
        scheme: symmetric scheme.
        options: none.
        scale_dtype: dtype in which the scales are stored; they are rounded to it before the weights are.

    Returns:
        The same codes and scales as compressed-tensors' minmax observer gives.
    """
    scale = absmax_scale(weight, scheme, scale_dtype)
    return Solution(QuantizedWeight(quantize(weight, scale, scheme), scale, scheme))
