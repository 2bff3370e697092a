"""Move scales from the input columns of some layers into what makes their input, exactly in what will be stored."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures import ARCHITECTURES, Fold

MAX_SCALE = 1e4  # and its inverse: beyond it a norm's weight leaves the range of half precision


@dataclass(frozen=True, slots=True)
class FoldScale:
    """What a transform chose for a fold.

    Attributes:
        scale: [P] float32 by which the producer's channels are divided; positive. Ones change nothing.
        record: what was tried, for quantkit.json.
    """

    scale: Tensor
    record: dict[str, Any] = field(default_factory=dict)


def applicable_folds(family: str, block: nn.Module, quantized: Collection[str]) -> list[Fold]:
    """The family's folds that this block allows.

    All consumers must be quantized, and the producer too if it is a linear layer: a matrix that is stored as it is
    cannot absorb a scale without being rounded again. A norm with a bias is passed over for the same reason.

    Args:
        family: model_type of the configuration.
        block: a decoder block; shapes suffice.
        quantized: names in the block of the layers that are quantized.
    """
    found = []
    for fold in ARCHITECTURES[family].folds if family in ARCHITECTURES else ():
        modules = dict(block.named_modules())
        producer = modules.get(fold.producer)
        if producer is None or not set(fold.consumers) <= set(quantized):
            continue
        if isinstance(producer, nn.Linear):
            usable = fold.producer in quantized
        else:
            usable = isinstance(getattr(producer, "weight", None), Tensor) and getattr(producer, "bias", None) is None
        if usable:
            found.append(fold)
    return found


def rewritten_parameter(fold: Fold, block: nn.Module) -> str | None:
    """The parameter of the block that the fold changes and that is not quantized, if there is one."""
    producer = block.get_submodule(fold.producer)
    if not isinstance(producer, nn.Linear):
        return f"{fold.producer}.weight"
    return f"{fold.producer}.bias" if producer.bias is not None else None


def num_channels(fold: Fold, block: nn.Module) -> int:
    """P: the producer's channels that carry a scale of their own."""
    columns = block.get_submodule(fold.consumers[0]).in_features
    assert isinstance(columns, int)
    if not fold.through_heads:
        return columns
    rows = block.get_submodule(fold.producer).out_features
    assert isinstance(rows, int)
    fused = rows > columns  # queries, keys and values in one matrix
    return (rows - columns) // 2 if fused else rows


def to_columns(fold: Fold, block: nn.Module, channels: Tensor) -> Tensor:
    """[P] values of the producer's channels -> [K] values of the consumers' columns."""
    columns = block.get_submodule(fold.consumers[0]).in_features
    assert isinstance(columns, int)
    if not fold.through_heads:
        return channels
    head_dim = block.get_submodule(fold.producer.rpartition(".")[0]).head_dim
    assert isinstance(head_dim, int)
    repeats = columns // channels.numel()
    return channels.view(-1, 1, head_dim).expand(-1, repeats, -1).reshape(-1)


def to_channels(fold: Fold, block: nn.Module, columns: Tensor, *, largest: bool) -> Tensor:
    """[K] values of the consumers' columns -> [P]: the largest, or the mean, of the columns that share a channel."""
    channels = num_channels(fold, block)
    if channels == columns.numel():
        return columns
    head_dim = block.get_submodule(fold.producer.rpartition(".")[0]).head_dim
    assert isinstance(head_dim, int)
    shared = columns.view(channels // head_dim, -1, head_dim)
    return (shared.amax(1) if largest else shared.mean(1)).reshape(-1)


def apply_fold(fold: Fold, block: nn.Module, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide the producer by ``scale`` and multiply the consumers' columns by what the stored producer makes of it.

    The producer's vector is rounded to ``dtype`` first; the quotient of the old vector and the rounded one is the scale
    that the matrices get. They are quantized later and are never stored as they are, so nothing is lost.

    Args:
        fold: of the block.
        block: in float32; changed in place.
        scale: [P] positive.
        dtype: storage dtype of what is not quantized.

    Returns:
        [P] the scales that were really applied; 1 where a channel cannot be scaled (its weight is zero).
    """
    producer = block.get_submodule(fold.producer)
    wanted = scale.clamp(1 / MAX_SCALE, MAX_SCALE)
    if isinstance(producer, nn.Linear):
        rows = slice(producer.out_features - len(scale), producer.out_features)
        applied = wanted
        if producer.bias is not None:
            bias = producer.bias.detach().clone()
            bias[rows], applied = _divide(bias[rows], wanted, 0.0, dtype, wanted)
            producer.bias = nn.Parameter(bias, requires_grad=False)
        weight = producer.weight.detach().clone()
        weight[rows] /= applied.unsqueeze(1)
        producer.weight = nn.Parameter(weight, requires_grad=False)
    else:
        assert isinstance(producer.weight, Tensor)
        stored, applied = _divide(producer.weight.detach(), wanted, fold.offset, dtype, torch.ones_like(scale))
        producer.weight = nn.Parameter(stored, requires_grad=False)
    columns = to_columns(fold, block, applied)
    for name in fold.consumers:
        consumer = block.get_submodule(name)
        assert isinstance(consumer, nn.Linear)
        consumer.weight = nn.Parameter(consumer.weight.detach() * columns, requires_grad=False)
    return applied


def _divide(
    vector: Tensor, scale: Tensor, offset: float, dtype: torch.dtype, where_zero: Tensor
) -> tuple[Tensor, Tensor]:
    """The vector that is stored for vector / scale, and the scale that it really stands for.

    Where the vector is zero every scale is right, and it is ``where_zero``; where the quotient cannot be stored, 1.
    """
    effective = vector + offset
    stored = (effective / scale - offset).to(dtype).float()
    remaining = stored + offset
    usable = torch.isfinite(stored) & (remaining != 0) & (effective != 0)
    applied = effective / torch.where(usable, remaining, effective)
    applied = torch.where(usable, applied, torch.where(effective == 0, where_zero, torch.ones_like(scale)))
    return torch.where(usable, stored, vector), applied
