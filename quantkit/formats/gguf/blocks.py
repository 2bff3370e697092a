"""A weight to the bytes of a GGUF tensor: plain types, plain rounding, or the grid that loses least."""

import gguf
import torch
from torch import Tensor

from quantkit.errors import QuantizationError
from quantkit.formats.gguf.block_types import BLOCK_TYPES, PLAIN_TYPES, row_multiple
from quantkit.formats.gguf.grid import Grid, nearest_levels
from quantkit.formats.gguf.packing import pack
from quantkit.formats.gguf.scale_search import search_grid

PLAINLY_ROUNDED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # types that the gguf package quantizes itself
IMPORTANCE_FLOOR = 1e-4  # least importance of a column, as a fraction of the mean


def encode_rows(weight: Tensor, type_name: str, importance: Tensor | None = None) -> Tensor:
    """The bytes of a tensor in a type.

    Args:
        weight: [..., K] of any floating type, finite.
        type_name: of the tensor.
        importance: [K] >= 0 mean square of each input column; without it the old types are rounded plainly, byte for
            byte as the gguf package does it, and the others are fitted to the weights alone.

    Returns:
        [..., bytes] uint8.

    Raises:
        QuantizationError: a weight is not finite or too large for the type, or a row is no multiple of its block.
    """
    if not torch.isfinite(weight.float().sum()) and not torch.isfinite(weight).all():
        raise QuantizationError("it holds NaN or infinity")
    columns = weight.shape[-1]
    if columns % row_multiple(type_name):
        raise QuantizationError(f"{type_name} needs rows of a multiple of {row_multiple(type_name)}, not {columns}")
    if type_name in PLAIN_TYPES:
        return _plain(weight, type_name)
    if importance is None and (type_name in PLAINLY_ROUNDED):
        data = gguf.quants.quantize(weight.float().contiguous().numpy(), BLOCK_TYPES[type_name].ggml)
        return torch.from_numpy(data)
    block_type = BLOCK_TYPES[type_name]
    rows = weight.float().reshape(-1, columns)
    grid = fit_grid(rows, type_name, importance)
    encoded = pack(nearest_levels(rows, grid, block_type), grid, block_type)
    return encoded.reshape(*weight.shape[:-1], -1)


def fit_grid(weight: Tensor, type_name: str, importance: Tensor | None) -> Grid:
    """The grid of [R, K] float32 weights that loses least.

    Raises:
        QuantizationError: a scale is too large for float16.
    """
    if importance is None:
        measure = (weight.square().mean(-1, keepdim=True) + weight.square()).sqrt_().add_(1e-30)
    else:
        measure = usable_importance(importance)
    grid = search_grid(weight, measure, BLOCK_TYPES[type_name])
    if not torch.isfinite(grid.d).all() or (grid.dmin is not None and not torch.isfinite(grid.dmin).all()):
        raise QuantizationError(f"its largest weight, {float(weight.abs().max()):.3g}, is too large for {type_name}")
    return grid


def usable_importance(importance: Tensor) -> Tensor:
    """[K] float32 > 0 with mean 1: columns that no token activates count a little, and all the same if none counts."""
    mean = importance.double().mean()
    if not mean > 0:
        return torch.ones(importance.shape)
    return (importance.double() / mean).clamp_(min=IMPORTANCE_FLOOR).float()


def _plain(weight: Tensor, type_name: str) -> Tensor:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
    stored = weight.to(dtype).contiguous()
    if type_name == "F16" and torch.isinf(stored).any():
        raise QuantizationError(f"its largest weight, {float(weight.abs().max()):.3g}, is too large for F16")
    return stored.view(torch.uint8)
