"""How far the inputs of a layer reach, and the one scale that quantizes them all: a static scheme's observers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MANTISSA_BITS = 4  # 16 bins an octave: a bin is 3 to 6 % wide
_SHIFT = 23 - _MANTISSA_BITS
_NUM_BINS = 256 << _MANTISSA_BITS
PERCENTILE = 99.99
MIN_CLIP_FRACTION = 0.05  # of the largest value; the search clips no further
_NUM_CLIPS = 120


@dataclass(slots=True)
class MagnitudeHistogram:
    """Counts of |x| in logarithmic bins: the leading bits of a float32 are the bin, so no logarithm is computed.

    Attributes:
        counts: [B] int64.
        absmax: largest |x|.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(_NUM_BINS, dtype=torch.int64))
    absmax: float = 0.0

    def add(self, x: Tensor) -> None:
        """Count the elements of ``x`` (any shape, finite)."""
        if x.numel() == 0:
            return
        size = x.detach().float().abs().reshape(-1)
        self.absmax = max(self.absmax, float(size.max()))
        self.counts += torch.bincount(size.view(torch.int32) >> _SHIFT, minlength=_NUM_BINS).to(self.counts.device)

    def values(self) -> Tensor:
        """[B] float64 middle of each bin; 0 for the lowest."""
        edges = torch.arange(_NUM_BINS + 1, dtype=torch.int64)
        edges = (edges.clamp(max=(255 << _MANTISSA_BITS) - 1) << _SHIFT).to(torch.int32).view(torch.float32).double()
        middle = (edges[:-1] + edges[1:]) / 2
        middle[0] = 0
        return middle


def minmax_clip(histogram: MagnitudeHistogram) -> float:
    """The largest value: nothing is clipped."""
    return histogram.absmax


def percentile_clip(histogram: MagnitudeHistogram) -> float:
    """The value that 99.99 % of the elements do not exceed, up to the width of a bin."""
    share = histogram.counts.cumsum(0).double() / max(int(histogram.counts.sum()), 1)
    index = int(torch.searchsorted(share, torch.tensor(PERCENTILE / 100, dtype=torch.float64)))
    return min(float(histogram.values()[min(index, _NUM_BINS - 1)]), histogram.absmax)


def mse_clip(histogram: MagnitudeHistogram) -> float:
    """The value to clip at with the least mean squared error of quantize and dequantize.

    An element below the clip is off by a uniform error of variance step^2 / 12 (or is rounded to zero, whichever is
    nearer), one above it by the distance to the clip.
    """
    used = histogram.counts.nonzero().reshape(-1)
    values, counts = histogram.values()[used], histogram.counts[used].double()
    best, best_error = histogram.absmax, float("inf")
    for trial in range(_NUM_CLIPS):
        clip = histogram.absmax * MIN_CLIP_FRACTION ** (trial / (_NUM_CLIPS - 1))
        step = clip / 127.5
        rounding = torch.where(values < step / 2, values.square(), torch.full_like(values, step * step / 12))
        error = float((torch.where(values > clip, (values - clip).square(), rounding) * counts).sum())
        if error < best_error:
            best, best_error = clip, error
    return best


OBSERVERS: dict[str, Callable[[MagnitudeHistogram], float]] = {
    "minmax": minmax_clip,
    "percentile": percentile_clip,
    "mse": mse_clip,
}


def static_input_scale(histogram: MagnitudeHistogram, observer: str, dtype: torch.dtype) -> Tensor:
    """[1] scale in storage dtype that puts the observer's clip at the end of the codes; 1 for inputs of zeros.

    Args:
        histogram: of the layer's inputs.
        observer: key of ``OBSERVERS``.
        dtype: storage dtype.
    """
    scale = torch.tensor([OBSERVERS[observer](histogram) / 127.5]).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)
