"""Round to nearest: every weight to the nearest code of its group's grid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.algorithms.scale_search import search_qparams
from quantkit.calibration.statistics import InputStatistics, Wanted
from quantkit.errors import QuantizationError
from quantkit.primitives import QuantizedWeight, choose_qparams, quantize
from quantkit.scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class Options:
    """Options of RTN.

    Attributes:
        search: search the scale (and zero point) of each group for the least rounding error, each column weighted by
            the mean square of its inputs, instead of covering the group's extremes. Needs calibration.
    """

    search: bool = False


def wanted(options: Options) -> Wanted:
    """Mean squares of the columns if scales are searched, else nothing."""
    return Wanted(columns=options.search)


def rtn(
    weight: Tensor,
    statistics: InputStatistics | None,
    scheme: QuantScheme,
    options: Options,
    scale_dtype: torch.dtype,
) -> Solution:
    """Quantize each weight on its own.

    Args:
        weight: [N, K] float32.
        statistics: of the layer's inputs; used only if ``options.search``.
        scheme: any scheme of integer weights.
        options: whether to search scales.
        scale_dtype: dtype in which the scales are stored; they are rounded to it before the weights are.

    Returns:
        Without a search the same codes, scales and zero points as compressed-tensors' minmax observer gives.

    Raises:
        QuantizationError: a search without calibration tokens.
    """
    if options.search:
        if statistics is None or statistics.num_tokens == 0:
            raise QuantizationError("RTN with search needs calibration tokens and saw none", fix="Set search: false")
        scale, zero_point = search_qparams(weight, statistics.mean_square, scheme, scale_dtype)
    else:
        scale, zero_point = choose_qparams(weight, scheme, scale_dtype)
    return Solution(QuantizedWeight(quantize(weight, scale, scheme, zero_point), scale, scheme, zero_point))
